"""NoLoCo's step time, compiled, and the annealing that lowers it; `bootstrap.placement.noloco` has the formulas."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from bootstrap.placement.kernels import Flags, Floats, Integers, cheapest_flow, compiled


class CostArrays(NamedTuple):
    """What the compiled loops need of a scenario and a training. [N, N] are seconds from device to device."""

    stages: int
    least_size: int  # of a stage: nobody is to be the only one that has it
    sizes_vary: bool
    fits: Flags  # [N, S]: the device's memory is enough for the stage
    activation: Floats  # [N, N]: t(i, j, c_a)
    occupied: Floats  # [N, N]: 8·c_a/β
    gossip: Floats  # [N, N]: t(i, j, c_g)
    throughput: Floats  # [N]: τ
    computes: bool
    site: Integers  # [N]: the uplink that a device is behind, or −1
    uplink: Floats  # [K]: 8·c_a/β of each shared uplink
    uniform: float  # ε, the share of traffic that is routed at random by throughput
    microbatches: float
    in_flight: float
    inner_steps: float


class TermArrays(NamedTuple):
    """Seconds for one microbatch of the swarm, but `pairs` for one exchange."""

    hops: Floats  # [S − 1]: h = Σ q_i·p_ij·t
    compute: Floats  # [S]: 1/Στ
    links: Floats  # [N]: activations to the next stage and gradients to the one before; as much comes in
    uplinks: Floats  # [K]: what crosses the border of a site
    pairs: Floats  # [S]: G
    latency: float  # L


@compiled
def grouped(stage_of: Integers, stages: int) -> tuple[Integers, Integers]:
    """`members` [N] and `starts` [S + 1]: stage s is members[starts[s] : starts[s + 1]]."""
    starts = np.zeros(stages + 1, np.int64)
    for stage in stage_of:
        starts[stage + 1] += 1
    for s in range(stages):
        starts[s + 1] += starts[s]
    members, seat = np.empty(stage_of.size, np.int64), starts.copy()
    for device in range(stage_of.size):
        members[seat[stage_of[device]]] = device
        seat[stage_of[device]] += 1
    return members, starts


@compiled
def terms_of(model: CostArrays, members: Integers, starts: Integers) -> TermArrays:
    """All terms of the placement that `grouped` gives."""
    stages = model.stages
    hops, compute, pairs = np.zeros(stages - 1), np.zeros(stages), np.zeros(stages)
    links, uplinks = np.zeros(members.size), np.zeros(model.uplink.size)
    latency = 0.0
    for s in range(stages):
        group = members[starts[s] : starts[s + 1]]
        for i in group:
            for j in group:
                pairs[s] += model.gossip[i, j]
        if group.size > 1:
            pairs[s] /= group.size * (group.size - 1)
        if model.computes:
            compute[s] = 1 / model.throughput[group].sum()
        if s + 1 < stages:
            hops[s] = add_hop(model, group, members[starts[s + 1] : starts[s + 2]], links, uplinks)
            latency += 2 * hops[s]
        latency += compute[s] * group.size
    return TermArrays(hops, compute, links, uplinks, pairs, latency)


@compiled
def add_hop(model: CostArrays, group: Integers, following: Integers, links: Floats, uplinks: Floats) -> float:
    """The mean hop from `group` to the `following` stage; adds what it keeps `links` and `uplinks` busy."""
    supply, demand = model.throughput[group], model.throughput[following]
    supply, demand = supply / supply.sum(), demand / demand.sum()
    flow = np.zeros((group.size, following.size))
    if model.uniform < 1:
        times = np.empty_like(flow)
        for a in range(group.size):
            for b in range(following.size):
                times[a, b] = model.activation[group[a], following[b]]
        cheapest_flow(times, supply, demand, flow)
    hop = 0.0
    for a in range(group.size):
        for b in range(following.size):
            i, j = group[a], following[b]
            share = (1 - model.uniform) * flow[a, b] + model.uniform * supply[a] * demand[b]
            hop += share * model.activation[i, j]
            links[i] += share * model.occupied[i, j]
            links[j] += share * model.occupied[i, j]
            if model.site[i] != model.site[j]:
                for site in (model.site[i], model.site[j]):
                    if site >= 0:
                        uplinks[site] += share * model.uplink[site]
    return hop


@compiled
def combined(model: CostArrays, terms: TermArrays, bottleneck: float) -> float:
    """T = L + (B − 1)·max(Z, L/F) + G/k, with `bottleneck` Z."""
    pace = max(bottleneck, terms.latency / model.in_flight)
    step: float = terms.latency + (model.microbatches - 1) * pace + terms.pairs.max() / model.inner_steps
    return step


@compiled
def step_time(model: CostArrays, stage_of: Integers) -> float:
    """T in seconds of `stage_of` [N]; infinite when a stage is too small or a device does not fit."""
    members, starts = grouped(stage_of, model.stages)
    for s in range(model.stages):
        if starts[s + 1] - starts[s] < model.least_size:
            return np.inf
    for device in range(stage_of.size):
        if not model.fits[device, stage_of[device]]:
            return np.inf
    terms = terms_of(model, members, starts)
    busiest = max(terms.links.max(), terms.compute.max())
    for site in range(terms.uplinks.size):
        busiest = max(busiest, terms.uplinks[site])
    return combined(model, terms, busiest)


# --- annealing --------------------------------------------------------------------------------


@compiled
def change(model: CostArrays, stage_of: Integers, generator: np.random.Generator) -> None:
    """One random change in place: of the stages' order now and then, else of one or two devices."""
    stages, count = model.stages, stage_of.size
    kind = generator.random()
    if kind < 0.05 and stages > 2:  # the stages between two turn round: the links at the two ends change
        first, last = int(generator.integers(0, stages)), int(generator.integers(0, stages))
        first, last = min(first, last), max(first, last)
        for device in range(count):
            if first <= stage_of[device] <= last:
                stage_of[device] = first + last - stage_of[device]
        return
    device, other = int(generator.integers(0, count)), int(generator.integers(0, count))
    if model.sizes_vary and kind > 0.7:
        stage_of[device] = generator.integers(0, stages)
        return
    while stage_of[other] == stage_of[device]:
        other = int(generator.integers(0, count))
    stage_of[device], stage_of[other] = stage_of[other], stage_of[device]


@compiled
def anneal_moves(
    model: CostArrays, stage_of: Integers, best: Integers, least: float, temperature: float, steps: int,
    generator: np.random.Generator,
) -> float:  # fmt: skip
    """Tries `steps` changes of `stage_of` at one `temperature`, the Metropolis rule deciding.

    `stage_of` [N] is left at the current placement; `best` becomes the best seen when that is below `least`, and its
    cost is returned.
    """
    current = step_time(model, stage_of)
    if current < least:
        least, best[:] = current, stage_of
    before = stage_of.copy()
    for _ in range(steps):
        before[:] = stage_of
        limit = current - temperature * np.log(generator.random())
        change(model, stage_of, generator)
        cost = step_time(model, stage_of)
        if cost <= limit:
            current = cost
            if cost < least:
                least, best[:] = cost, stage_of
        else:
            stage_of[:] = before
    return least


class MoveAnnealer:
    """A walk by such changes; `least` and `best` [N] are of the best placement seen."""

    def __init__(self, model: CostArrays, start: Integers, generator: np.random.Generator) -> None:
        self._model, self._generator = model, generator
        self._current = start.astype(np.int64)
        self.best, self.least = self._current.copy(), math.inf

    def walk(self, temperature: float, steps: int) -> None:
        if self._model.stages == 1:
            steps = 0  # there is one placement
        self.least = anneal_moves(
            self._model, self._current, self.best, self.least, temperature, steps, self._generator
        )
