"""Placements built from what devices stand close together, and all placements where these are few.

A machine of several devices, or a site of several machines, can go two ways: into one stage, where its fast links
serve data parallelism, or over as many stages as it has devices, where they serve the hops between stages. And
devices of different kinds, fast links and slow ones, are to be kept apart, since the slowest of a stage decides.
A search by single changes does not come from one such placement to the other: what is between costs more. So all
are built: for each way to see machines in the links, each order of the machines and each width c, c stages at a
time are filled with the next machines, the first devices of all of them first. Width 1 keeps machines within
stages, a wider one spreads each over c of them; sorted by size and speed, no stage has two kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise, product

import numpy as np

from bootstrap.lab.placement.dtfm import DtfmProblem
from bootstrap.lab.placement.kernels import Floats, Integers
from bootstrap.lab.placement.search import Found, Problem
from node.machine.limits import optional

hierarchy = optional("scipy.cluster.hierarchy", "lab")
squareform = optional("scipy.spatial.distance", "lab").squareform

MAX_CUTS = 4  # ways to see machines in the links
MAX_WIDTHS = 8
ENUMERATED = 5000  # placements at most, when all are tried; a fraction of a second
MAX_ENUMERATED_DEVICES = 16


# --- machines within stages, and across them ---------------------------------------------------------


def built(problem: Problem, generator: np.random.Generator) -> Iterator[Found]:
    """Yield all that the links suggest, in random order; some hundred, and none when there is nothing to choose."""
    if problem.stages == 1 or problem.stages == len(problem.weights):
        return
    tree = hierarchy.linkage(squareform(problem.weights, checks=False), "average")
    orders = [order for cut in cuts(tree) for order in orders_of(problem.weights, tree, cut, generator)]
    widths = sorted({round(width) for width in np.geomspace(1, problem.stages, MAX_WIDTHS)})
    choices = list(product(orders, widths))
    for number in generator.permutation(len(choices)):
        order, width = choices[number]
        # a random placement says what is allowed: the sizes of its groups are kept
        sizes = np.bincount(problem.drawn(generator), minlength=problem.stages)
        stage_of = laid_out(order, sizes, width)
        yield Found(stage_of, problem.cost(stage_of))


def cuts(tree: Floats) -> list[Integers]:
    """The machine of each device [N], cutting `tree` where the next link is slower than the last by most.

    The first cut has every device by itself.
    """
    heights = np.maximum(tree[:, 2], 1e-12)
    gaps = heights[1:] / heights[:-1]
    found = [np.arange(len(tree) + 1)]
    for place in np.argsort(-gaps, kind="stable")[:MAX_CUTS]:
        if gaps[place] > 1.05:
            found.append(hierarchy.fcluster(tree, (tree[place, 2] + tree[place + 1, 2]) / 2, "distance"))
    return found


def orders_of(
    weights: Floats, tree: Floats, machine: Integers, generator: np.random.Generator
) -> Iterator[list[list[int]]]:
    """The machines' devices, three times: by size and speed, by speed, by neighbourhood."""
    _, machine = np.unique(machine, return_inverse=True)
    slowness = np.array([np.median(row) for row in weights])
    machines = [np.flatnonzero(machine == number).tolist() for number in range(machine.max() + 1)]
    mean = {id(own): float(slowness[own].mean()) for own in machines}
    chance = {id(own): generator.random() for own in machines}
    leaf = np.argsort(hierarchy.leaves_list(tree))
    yield sorted(machines, key=lambda own: (-len(own), mean[id(own)], chance[id(own)]))
    yield sorted(machines, key=lambda own: (mean[id(own)], chance[id(own)]))
    yield sorted(machines, key=lambda own: int(leaf[own[0]]))


def laid_out(machines: list[list[int]], sizes: Integers, width: int) -> Integers:
    """The stage of each device [N]: `width` stages at a time take the next machines, of `sizes` [S] in all."""
    line = [device for own in machines for device in own]
    ends = np.cumsum(sizes)
    borders = [0, *ends[width - 1 :: width].tolist()]
    if borders[-1] < len(line):
        borders.append(len(line))
    rank = {
        device: (place, number) for number, own in enumerate(machines) for place, device in enumerate(own)
    }
    dealt: list[int] = []
    for begin, end in pairwise(borders):
        dealt += sorted(line[begin:end], key=rank.__getitem__)
    stage_of = np.empty(len(line), np.int64)
    stage_of[dealt] = np.repeat(np.arange(len(sizes)), sizes)
    return stage_of


# --- all placements -----------------------------------------------------------------------------


def enumerated(problem: Problem, most: int) -> list[Integers] | None:
    """All placements that a search may come to, the stage of each device [N]; None when they are more than `most`."""
    if len(problem.weights) > MAX_ENUMERATED_DEVICES:
        return None
    found = list(islice(_placements(problem, []), most + 1))
    return None if len(found) > most else [np.array(stages, np.int64) for stages in found]


def _placements(problem: Problem, begun: list[int]) -> Iterator[list[int]]:
    """Yield the placements that begin so. Where the order does not matter, stages are opened in their order."""
    count, stages = len(problem.weights), problem.stages
    if len(begun) == count:
        yield begun
        return
    size, larger = divmod(count, stages)
    sizes = [begun.count(stage) for stage in range(stages)]
    may_grow = sum(held > size for held in sizes) < larger
    for stage in range(stages):
        if is_free(problem) or sizes[stage] < size or (sizes[stage] == size and may_grow):
            yield from _placements(problem, [*begun, stage])
        if isinstance(problem, DtfmProblem) and not sizes[stage]:
            return


def is_free(problem: Problem) -> bool:
    """Return whether a search also comes to groups that are not as equal as they can be."""
    if isinstance(problem, DtfmProblem):
        return False
    return problem.model.sizes_vary or not bool(problem.model.fits.all())
