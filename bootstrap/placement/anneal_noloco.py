"""Annealing on NoLoCo's step time: swaps, moves between stages of unequal size, and changes of the stages' order."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.kernels import compiled
from bootstrap.placement.step import combined, fill_terms

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class CostArrays(NamedTuple):
    """What the compiled loops need of a scenario and a training; see `step.fill_terms` for the arrays."""

    stages: int
    least_size: int  # of a stage: nobody is to be the only one that has it
    sizes_vary: bool
    fits: Flags  # [N, S]: the device's memory is enough for the stage
    activation: Floats
    occupied: Floats
    gossip: Floats
    throughput: Floats
    computes: bool
    site: Integers
    uplink: Floats
    uniform: float
    microbatches: float
    in_flight: float
    inner_steps: float
    hidden: float


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
def step_time(model: CostArrays, stage_of: Integers) -> float:
    """T in seconds of `stage_of` [N]; infinite when a stage is too small or a device does not fit."""
    members, starts = grouped(stage_of, model.stages)
    for s in range(model.stages):
        if starts[s + 1] - starts[s] < model.least_size:
            return np.inf
    for device in range(stage_of.size):
        if not model.fits[device, stage_of[device]]:
            return np.inf
    hops, compute, pairs = np.empty(model.stages - 1), np.empty(model.stages), np.empty(model.stages)
    links, uplinks = np.empty(stage_of.size), np.empty(model.uplink.size)
    fill_terms(
        members, starts, model.activation, model.occupied, model.gossip, model.throughput, model.computes,
        model.site, model.uplink, model.uniform, hops, compute, links, uplinks, pairs,
    )  # fmt: skip
    latency, busiest = 2 * hops.sum(), links.max()
    for s in range(model.stages):
        latency += compute[s] * (starts[s + 1] - starts[s])
        busiest = max(busiest, compute[s])
    for site in range(uplinks.size):
        busiest = max(busiest, uplinks[site])
    return combined(
        latency, busiest, pairs.max(), model.microbatches, model.in_flight, model.inner_steps, model.hidden
    )


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
