"""DT-FM's cost of a placement: arXiv 2206.01288, equations 2 to 4.

S stages of n replicas. Volumes c in bytes, latency α in seconds one way, bandwidth β in bit/s.

- eq. 2: DP(C) = max over d in C of Σ over e in C, e ≠ d, of 2·(α_de + 8·c_dp/(n·β_de)); DP = max over stages C.
- eq. 3: hop(A, B) = 2·(α + 8·c_pp/β) of the slowest link of the perfect matching in which that is fastest.
- eq. 4: PP = the shortest open path through all stages over the hops. COMM = DP + PP.

It ranks placements. It does not predict seconds: compute, memory, shared uplinks and overlap are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.anneal_dtfm import SwapAnnealer
from bootstrap.placement.coarse import block_means, cluster_size, clusters
from bootstrap.placement.kernels import bottleneck, communication, data_parallel, shortest_path
from bootstrap.placement.scenario import Scenario
from protocol.errors import ScenarioError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_STAGES = 16  # the path is exact: 2^S sets of stages; 16 take some milliseconds an evaluation


@dataclass(frozen=True)
class DtfmProblem:
    """Seconds between devices [N, N]: of eq. 2 for one member of a group of n, of eq. 3 for a macro-batch."""

    parallel: Floats
    pipeline: Floats
    stages: int
    replicas: int

    @property
    def weights(self) -> Floats:
        """w = α + 8·c_pp/β, one way."""
        one_way: Floats = self.pipeline / 2
        return one_way

    @property
    def order_matters(self) -> bool:
        """The shortest path orders the stages."""
        return False

    def cost(self, stage_of: Integers) -> float:
        """COMM in seconds, of `stage_of` [N] with n devices in each stage."""
        count = self.stages
        hops, shortest = np.empty((count, count)), np.empty((1 << count, count))
        groups = groups_of(stage_of, count)
        return float(communication(self.parallel, self.pipeline, groups, hops, shortest))

    def drawn(self, generator: np.random.Generator) -> Integers:
        return generator.permutation(np.repeat(np.arange(self.stages), self.replicas))

    def annealer(self, start: Integers, generator: np.random.Generator) -> SwapAnnealer:
        return SwapAnnealer(self.parallel, self.pipeline, groups_of(start, self.stages), generator)

    def coarse(self, generator: np.random.Generator) -> tuple[DtfmProblem, Integers] | None:
        """A device's sum over its group becomes a cluster's, each other cluster standing for its m members."""
        size = cluster_size(len(self.pipeline), self.replicas)
        if size == 1:
            return None
        members = clusters(self.pipeline, size, generator)
        parallel = size * block_means(self.parallel, members)
        pipeline = block_means(self.pipeline, members)
        return DtfmProblem(parallel, pipeline, self.stages, self.replicas // size), members


@dataclass(frozen=True)
class DtfmCost:
    """Seconds. `pipelines` [S][n]: stages in the order of the path; a column is one pipeline of matched devices."""

    parallel: float
    pipeline: float
    pipelines: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> float:
        return self.parallel + self.pipeline


def dtfm_problem(scenario: Scenario, stages: int, replicas: int) -> DtfmProblem:
    """Raises `ScenarioError` when the devices are not exactly those that the stages need."""
    if scenario.devices < stages:
        raise ScenarioError(f"{scenario.devices} devices cannot fill {stages} stages: ask for fewer stages.")
    if stages * replicas != scenario.devices:
        raise ScenarioError(
            f"{stages} stages of {replicas} replicas are {stages * replicas} devices, but the scenario has "
            f"{scenario.devices}. Change --stages or --replicas."
        )
    if stages > MAX_STAGES:
        raise ScenarioError(f"--stages {stages}: the objective dtfm goes up to {MAX_STAGES}; try noloco.")
    parallel = 2 * scenario.transfer(scenario.data_parallel_bytes / replicas)
    pipeline = 2 * scenario.transfer(scenario.pipeline_bytes)
    return DtfmProblem(parallel, pipeline, stages, replicas)


def groups_of(stage_of: Integers, stages: int) -> Integers:
    """[S, n] devices of each stage, from the stage of each device [N]; all stages have n."""
    return np.argsort(stage_of, kind="stable").reshape(stages, -1)


def explain(problem: DtfmProblem, stage_of: Integers) -> DtfmCost:
    """The terms of the cost, the order of the stages and the pipelines."""
    groups, count = groups_of(stage_of, problem.stages), problem.stages
    parallel = max(float(data_parallel(problem.parallel, group)) for group in groups)
    hops = np.zeros((count, count))
    partner = np.empty(problem.replicas, np.int64)
    for s in range(count):
        for t in range(s):
            hops[s, t] = hops[t, s] = bottleneck(problem.pipeline, groups[s], groups[t], partner)
    order = path_order(hops)
    rows = [groups[order[0]]]
    for stage in order[1:]:
        bottleneck(problem.pipeline, rows[-1], groups[stage], partner)
        row = np.empty_like(partner)
        row[partner] = groups[stage]
        rows.append(row)
    length = sum(hops[a, b] for a, b in pairwise(order))
    return DtfmCost(parallel, float(length), tuple(tuple(int(d) for d in row) for row in rows))


def path_order(hops: Floats) -> list[int]:
    """The stages [S] in the order of the shortest open path through all of them."""
    count = len(hops)
    if count == 1:
        return [0]
    shortest = np.full((1 << count, count), np.inf)
    length = shortest_path(hops, shortest)
    half, everything = (count + 1) // 2, (1 << count) - 1
    for chosen in (mask for mask in range(everything) if mask.bit_count() == half):
        other = everything ^ chosen
        joined = shortest[chosen][:, None] + hops + shortest[other]
        u, v = np.unravel_index(np.argmin(joined), joined.shape)
        if joined[u, v] <= length * (1 + 1e-12):
            return _back(hops, shortest, chosen, int(u))[::-1] + _back(hops, shortest, other, int(v))
    raise AssertionError("the shortest path has no middle")


def _back(hops: Floats, shortest: Floats, chosen: int, last: int) -> list[int]:
    """The path of `shortest`[chosen, last] from its end to its start."""
    path = [last]
    while chosen := chosen ^ (1 << last):
        last = int(np.argmin(shortest[chosen] + hops[:, last]))
        path.append(last)
    return path
