"""The searches for a placement, each a generator that `bootstrap.placement.search` runs.

The default is simulated annealing on the true cost. It tries single changes, thousands in a row in compiled code,
and accepts a worse placement with probability exp(−Δ/temperature). Equal cost is always accepted, so it drifts over
the plateaus that equal links make.

A budget goes to these in turn: greedy placements, whose stages are then put in order; DT-FM's genetic algorithm
(which is done within seconds when links are regular); a hot run among clusters if there are many devices; a hot run
from a random placement, and a warm one from the best so far. With hundreds of devices, or where a few slow ones
decide, the hot run alone does not find a placement as good as those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, combinations, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from bootstrap.placement.kernels import Flags, Floats, Integers, compiled
from bootstrap.placement.search import BudgetMeter, Found, Method, Problem

# of a random placement's cost; tried on the scenarios of tests/data and perturbed copies (docs/placement.md)
HOT, WARM, COLD = 0.05, 0.01, 0.0002
GAINED = 0.1  # of what is gained over random placements: the warm run is not to lose more
DRAWN = 20  # random placements, for the scale of costs
# what is spent of the budget when each part ends
BUILT, BRED, CLUSTERED, HOT_RUN = 0.03, 0.07, 0.45, 0.55
CHUNK_SECONDS = 0.02
CHUNKS = 400  # at least, of a budget

POPULATION = 100
CROSSED = 5  # devices whose groups come from the other parent

by_cost = attrgetter("cost")


def anneal(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """Greedy placements, the genetic algorithm, a hot run, a warm one."""
    seen = list(islice(random_placements(problem, meter, generator), meter.at_most(DRAWN)))
    yield from seen
    best = min(seen, key=by_cost)
    scale = best.cost
    built = min(
        0.25, BUILT * max(1.0, (best.stage_of.size / 64) ** 2)
    )  # the more devices, the less the runs find
    for found in chain(
        until(built, ordered(problem, greedy(problem, meter, generator)), meter),
        until(built + BRED, genetic(problem, meter, generator), meter),
        clustered(problem, scale, meter, generator),
        cooled(problem, seen[-1], HOT * scale, COLD * scale, HOT_RUN, meter, generator),
    ):
        best = min(best, found, key=by_cost)
        yield found
    # where all placements cost nearly the same, what the search has gained so far is the scale
    warm = max(min(WARM * scale, GAINED * (scale - best.cost)), 1e-9 * scale)
    yield from cooled(problem, best, warm, min(COLD * scale, warm / 10), 1.0, meter, generator)


def clustered(
    problem: Problem, scale: float, meter: BudgetMeter, generator: np.random.Generator
) -> Iterator[Found]:
    """A hot run among clusters of devices, where there are many; what it finds counts by its cost among devices."""
    if (made := problem.coarse(generator)) is None:
        return
    coarse, members = made
    start = Found(coarse.drawn(generator), np.inf)
    for among in cooled(coarse, start, HOT * scale, COLD * scale, CLUSTERED, meter, generator):
        stage_of = lifted(among.stage_of, members)
        yield Found(stage_of, problem.cost(stage_of), among.evaluations)


def lifted(stage_of: Integers, members: Integers) -> Integers:
    """The stage of each device [N] from that of its cluster [C], whose devices are `members` [C, m]."""
    stages = np.empty(members.size, np.int64)
    stages[members] = stage_of[:, None]
    return stages


def until(end: float, method: Iterator[Found], meter: BudgetMeter) -> Iterator[Found]:
    """What `method` finds until the fraction `end` of the budget is spent."""
    while meter.spent() < end:
        yield next(method)


def cooled(
    problem: Problem,
    start: Found,
    hot: float,
    cold: float,
    end: float,
    meter: BudgetMeter,
    generator: np.random.Generator,
) -> Iterator[Found]:
    """One run from `start` until the fraction `end` of the budget is spent; it cools from hot to cold."""
    state = problem.state(start.stage_of)
    best, least = state.copy(), np.inf
    begun, steps = meter.spent(), 50
    while (spent := meter.spent()) < end:
        temperature = hot * (cold / hot) ** ((spent - begun) / (end - begun))
        since, steps = meter.seconds, meter.at_most(steps)
        if problem.stages > 1:  # or there is one placement
            least = problem.walk(state, best, least, temperature, steps, generator)
        yield Found(problem.placement(best), least, steps)
        steps = chunk(steps, meter, meter.seconds - since)


def chunk(steps: int, meter: BudgetMeter, took: float) -> int:
    """How many steps next: many enough for the loop around them not to matter, few enough for a smooth schedule."""
    if meter.budget.seconds is None:
        return max(1, (meter.budget.evaluations or 0) // CHUNKS)
    longest = min(CHUNK_SECONDS, meter.budget.seconds / CHUNKS)
    return max(1, min(2 * steps, int(steps * longest / max(took, 1e-9))))


# --- the simple searches ------------------------------------------------------------------------


def random_placements(
    problem: Problem, meter: BudgetMeter, generator: np.random.Generator
) -> Iterator[Found]:
    """Random placements, one after the other."""
    while True:
        placement = problem.drawn(generator)
        yield Found(placement, problem.cost(placement))


def greedy(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """Fills stage after stage with the devices nearest to those already in it, each time from other first devices."""
    while True:
        # a random placement says what is allowed: the sizes of its groups are kept
        sizes = np.bincount(problem.drawn(generator), minlength=problem.stages)
        placement = near_neighbours(problem, sizes, generator)
        yield Found(placement, problem.cost(placement))


def near_neighbours(problem: Problem, sizes: Integers, generator: np.random.Generator) -> Integers:
    """The stage of each device [N], with `sizes` [S]; ties are broken at random."""
    count = len(problem.weights)
    stage_of = np.full(count, -1)
    for stage, size in enumerate(sizes):
        distance = generator.random(count) * 1e-9  # breaks ties at random
        for _ in range(size):
            free = np.flatnonzero(stage_of < 0)
            chosen = free[np.argmin(distance[free])]
            stage_of[chosen] = stage
            distance += problem.weights[chosen]
    return stage_of


def ordered(problem: Problem, found: Iterator[Found]) -> Iterator[Found]:
    """What another search finds, and the same with its stages reordered where that matters."""
    for one in found:
        yield one
        if problem.order_matters:
            yield in_best_order(problem, one)


def in_best_order(problem: Problem, found: Found) -> Found:
    """The same groups with the stages reordered, by single changes until none helps."""
    order, best, evaluations = list(range(problem.stages)), found, 0
    improved = True
    while improved:
        improved = False
        for trial in neighbours(order):
            stage_of = np.argsort(trial)[found.stage_of]
            cost = problem.cost(stage_of)
            evaluations += 1
            if cost < best.cost:
                order, best, improved = trial, Found(stage_of, cost), True
    return Found(best.stage_of, best.cost, evaluations)


def neighbours(order: list[int]) -> Iterator[list[int]]:
    """Orders in which two change places, those from one to another turn round, or one moves elsewhere."""
    for first, last in combinations(range(len(order)), 2):
        before, between, after = order[:first], order[first : last + 1], order[last + 1 :]
        yield [*before, *between[::-1], *after]
        yield [*before, between[-1], *between[1:-1], between[0], *after]
        yield [*before, *between[1:], between[0], *after]
        yield [*before, between[-1], *between[:-1], *after]


# --- DT-FM's genetic algorithm --------------------------------------------------------------------------
#
# arXiv 2206.01288, section 3.3, as its public solver has it. 100 random partitions. Again and again: two parents
# drawn at random, a child that takes the groups of five random devices from one and the rest from the other, sizes
# repaired, one pass of local search by chains, one evaluation; it replaces the worse parent if it is better. Matching
# and path are solved inside the evaluation.


def genetic(
    problem: Problem, meter: BudgetMeter, generator: np.random.Generator, wasted_links: bool = True
) -> Iterator[Found]:
    """With DT-FM's local search, which moves fast links out of groups, or else with Kernighan and Lin's."""
    population: list[Found] = []
    for found in islice(random_placements(problem, meter, generator), POPULATION):
        population.append(found)
        yield found
    sizes = np.bincount(population[0].stage_of, minlength=problem.stages)
    while True:
        first, second = generator.choice(POPULATION, 2, replace=False)
        child = population[first].stage_of.copy()
        crossed = generator.choice(child.size, min(CROSSED, child.size), replace=False)
        child[crossed] = population[second].stage_of[crossed]
        repair(child, sizes, generator)
        improve(problem.weights, child, problem.stages, wasted_links)
        found = Found(child, problem.cost(child))
        worse = max(first, second, key=lambda parent: population[parent].cost)
        if found.cost < population[worse].cost:
            population[worse] = found
        yield found


def repair(stage_of: Integers, sizes: Integers, generator: np.random.Generator) -> None:
    """Moves random devices out of groups larger than `sizes` [S] into smaller ones, in place."""
    actual = np.bincount(stage_of, minlength=len(sizes))
    surplus = [
        generator.choice(np.flatnonzero(stage_of == stage), excess, replace=False)
        for stage, excess in enumerate(actual - sizes)
        if excess > 0
    ]
    if surplus:
        vacancies = np.repeat(np.arange(len(sizes)), np.maximum(sizes - actual, 0))
        stage_of[np.concatenate(surplus)] = generator.permutation(vacancies)


# --- its local search by chains of moves ----------------------------------------------------------------
#
# A chain starts in the group with the best gain, moves one device to its best target, goes on from that target, and
# ends when it comes home, so that all sizes are as before; its best prefix, closed by a move home, is kept. With w
# the seconds of a macro-batch over a link, one way, and A a device's own group:
#
# - DT-FM: a group's candidate is the device with the fastest link to a group-mate, and gain(d: A → B) = mean over B
#   of w_de − min over A of w_de. A fast link inside a group is wasted, since DP waits for the slowest there; between
#   two groups the matching can use it.
# - Kernighan and Lin: any device may move, gain(d: A → B) = Σ over A of w_de − Σ over B of w_de. It keeps fast links
#   inside.


class Partition(NamedTuple):
    """Groups that chains of moves change in place. `weights` [N, N] is symmetric with a diagonal of 0."""

    weights: Floats
    stage_of: Integers  # [N]
    sums: Floats  # [N, S]: of a device's weights to the members of each group
    sizes: Floats  # [S]
    moved: Flags  # [N]: a device moves at most once in a pass
    wasted_links: bool  # DT-FM's gain, not Kernighan and Lin's


@compiled
def improve(weights: Floats, stage_of: Integers, stages: int, wasted_links: bool) -> float:
    """One pass of chains over `stage_of` [N], in place; returns the gain."""
    count = stage_of.size
    sums, sizes = np.zeros((count, stages)), np.zeros(stages)
    for d in range(count):
        sizes[stage_of[d]] += 1
        for e in range(count):
            sums[d, stage_of[e]] += weights[d, e]
    groups = Partition(weights, stage_of, sums, sizes, np.zeros(count, np.bool_), wasted_links)
    total = 0.0
    for _ in range(stages):
        gain = run_chain(groups)
        if gain <= 0:
            break
        total += gain
    return total


@compiled
def run_chain(groups: Partition) -> float:
    """One chain; its gain, and 0 when it was taken back."""
    stages, stage_of = groups.sizes.size, groups.stage_of
    devices, origins = np.empty(stages + 1, np.int64), np.empty(stages + 1, np.int64)
    open_groups, only_home = np.ones(stages, np.bool_), np.zeros(stages, np.bool_)
    gain, device, target = -np.inf, -1, -1
    for group in range(stages):
        found, d, t = best_move(groups, group, open_groups)
        if found > gain:
            gain, device, target = found, d, t
    if device < 0:
        return 0.0
    home = stage_of[device]
    only_home[home] = True
    reached, best, kept, closing, made = 0.0, 0.0, 0, -1, 0
    while device >= 0:
        origins[made], devices[made] = stage_of[device], device
        made += 1
        reached += gain
        move(groups, device, target)
        if target == home:
            if reached > best:
                best, kept, closing = reached, made, -1
            break
        back, d, _ = best_move(groups, target, only_home)
        if d >= 0 and reached + back > best:
            best, kept, closing = reached + back, made, d
        open_groups[target] = False
        gain, device, target = best_move(groups, target, open_groups)
    for step in range(made - 1, kept - 1, -1):
        move(groups, devices[step], origins[step])
        groups.moved[devices[step]] = False
    if closing >= 0:
        move(groups, closing, home)
    return best


@compiled
def move(groups: Partition, device: int, target: int) -> None:
    origin = groups.stage_of[device]
    for d in range(groups.stage_of.size):
        groups.sums[d, origin] -= groups.weights[d, device]
        groups.sums[d, target] += groups.weights[d, device]
    groups.sizes[origin] -= 1
    groups.sizes[target] += 1
    groups.stage_of[device] = target
    groups.moved[device] = True


@compiled
def best_move(groups: Partition, group: int, targets: Flags) -> tuple[float, int, int]:
    """The best gain of a move out of `group`, its device and target; device −1 when there is none."""
    weights, stage_of, sums = groups.weights, groups.stage_of, groups.sums
    gain, device, target = -np.inf, -1, -1
    fastest, candidate = np.inf, -1
    for d in range(stage_of.size):
        if stage_of[d] != group or groups.moved[d]:
            continue
        if groups.wasted_links:
            for e in range(stage_of.size):
                if e != d and stage_of[e] == group and weights[d, e] < fastest:
                    fastest, candidate = weights[d, e], d
            continue
        for t in range(groups.sizes.size):
            if t != group and targets[t] and sums[d, group] - sums[d, t] > gain:
                gain, device, target = sums[d, group] - sums[d, t], d, t
    if candidate >= 0:
        for t in range(groups.sizes.size):
            if t != group and targets[t]:
                found = sums[candidate, t] / groups.sizes[t] - fastest
                if found > gain:
                    gain, device, target = found, candidate, t
    return gain, device, target


# what `noloco plan --method` takes
METHODS: dict[str, Method] = {
    "anneal": anneal,
    "genetic": genetic,
    "kernighan-lin": partial(genetic, wasted_links=False),
    "greedy": greedy,
    "random": random_placements,
}
