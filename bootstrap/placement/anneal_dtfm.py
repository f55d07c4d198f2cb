"""Annealing by swaps on DT-FM's cost itself: what a swap changes is computed anew, the rest is kept.

Of S groups a swap touches two: their DP terms and the 2S − 3 hops at either of them. DP is the cheap part and comes
first: a swap that it alone rules out costs no matching.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.kernels import bottleneck, communication, compiled, data_parallel, shortest_path

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class SwapAnnealer:
    """A walk by swaps; `least` and `best` [N], the stage of each device, are of the best placement seen."""

    def __init__(
        self, parallel: Floats, pipeline: Floats, groups: Integers, generator: np.random.Generator
    ) -> None:
        self._times, self._generator = (parallel, pipeline), generator
        self._groups, self._best = groups.copy(), groups.copy()
        self.least = math.inf

    @property
    def best(self) -> Integers:
        stages, replicas = self._best.shape
        stage_of = np.empty(self._best.size, np.int64)
        stage_of[self._best.ravel()] = np.repeat(np.arange(stages), replicas)
        return stage_of

    def walk(self, temperature: float, steps: int) -> None:
        if len(self._groups) == 1:
            steps = 0  # there is nothing to swap
        self.least = anneal_swaps(
            *self._times, self._groups, self._best, self.least, temperature, steps, self._generator
        )


@compiled
def anneal_swaps(
    parallel: Floats, pipeline: Floats, groups: Integers, best: Integers, least: float, temperature: float,
    steps: int, generator: np.random.Generator,
) -> float:  # fmt: skip
    """Tries `steps` swaps at one `temperature` in seconds, the Metropolis rule deciding. Returns the least cost.

    `groups` [S, n] is left at the current placement; `best` becomes the best one seen when that is below `least`.
    """
    count, replicas = groups.shape
    hops, shortest = np.empty((count, count)), np.empty((1 << count, count))
    tried, partner = np.empty((count, count)), np.empty(replicas, np.int64)
    current = communication(parallel, pipeline, groups, hops, shortest)
    slowest = np.empty(count)
    for s in range(count):
        slowest[s] = data_parallel(parallel, groups[s])
    if current < least:
        least, best[:] = current, groups
    for _ in range(steps):
        s, i = int(generator.integers(0, count)), generator.integers(0, replicas)
        t, j = (s + 1 + int(generator.integers(0, count - 1))) % count, generator.integers(0, replicas)
        limit = current - temperature * np.log(generator.random())
        groups[s, i], groups[t, j] = groups[t, j], groups[s, i]
        slow_s, slow_t = data_parallel(parallel, groups[s]), data_parallel(parallel, groups[t])
        stage_wide = max(slow_s, slow_t)
        for u in range(count):
            if u != s and u != t:
                stage_wide = max(stage_wide, slowest[u])
        accepted = False
        if stage_wide <= limit:
            tried[:] = hops
            for u in range(count):
                if u != s:
                    tried[s, u] = tried[u, s] = bottleneck(pipeline, groups[s], groups[u], partner)
                if u != s and u != t:
                    tried[t, u] = tried[u, t] = bottleneck(pipeline, groups[t], groups[u], partner)
            cost = stage_wide + shortest_path(tried, shortest)
            accepted = cost <= limit
        if accepted:
            current = cost
            hops[:] = tried
            slowest[s], slowest[t] = slow_s, slow_t
            if cost < least:
                least, best[:] = cost, groups
        else:
            groups[s, i], groups[t, j] = groups[t, j], groups[s, i]
    return least
