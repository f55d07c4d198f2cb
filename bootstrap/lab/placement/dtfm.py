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
from typing import ClassVar

import numpy as np

from bootstrap.lab.placement.clusters import block_means, cluster_size, clusters
from bootstrap.lab.placement.kernels import Floats, Integers, bottleneck, compiled, shortest_path
from bootstrap.lab.placement.scenario import Scenario
from protocol.errors import ScenarioError

MAX_STAGES = 16  # the path is exact: 2^S sets of stages; 16 take some milliseconds an evaluation


@dataclass(frozen=True)
class DtfmProblem:
    """Seconds between devices [N, N]: of eq. 2 for one member of a group of n, of eq. 3 for a macro-batch."""

    parallel: Floats
    pipeline: Floats
    stages: int
    replicas: int

    order_matters: ClassVar[bool] = False  # the shortest path orders the stages

    @property
    def weights(self) -> Floats:
        """[N, N] seconds of a macro-batch one way, w = α + 8·c_pp/β: what chains of moves go by."""
        one_way: Floats = self.pipeline / 2
        return one_way

    def cost(self, stage_of: Integers) -> float:
        """COMM in seconds, of `stage_of` [N] with n devices in each stage."""
        count = self.stages
        hops, shortest = np.empty((count, count)), np.empty((1 << count, count))
        groups = groups_of(stage_of, count)
        return float(communication(self.parallel, self.pipeline, groups, hops, shortest))

    def drawn(self, generator: np.random.Generator) -> Integers:
        return generator.permutation(np.repeat(np.arange(self.stages), self.replicas))

    def state(self, stage_of: Integers) -> Integers:
        """The array that a walk changes in place: the devices of each stage [S, n]."""
        return groups_of(stage_of, self.stages)

    def placement(self, state: Integers) -> Integers:
        """The stage of each device [N]."""
        stage_of = np.empty(state.size, np.int64)
        stage_of[state.ravel()] = np.repeat(np.arange(self.stages), self.replicas)
        return stage_of

    def walk(
        self, state: Integers, best: Integers, least: float, temperature: float, steps: int,
        generator: np.random.Generator,
    ) -> float:  # fmt: skip
        """Walk by `anneal_swaps`."""
        return float(
            anneal_swaps(self.parallel, self.pipeline, state, best, least, temperature, steps, generator)
        )

    def coarse(self, generator: np.random.Generator) -> tuple[DtfmProblem, Integers] | None:
        """The problem among clusters of devices, and their members [C, m]; None where that is of no use.

        A device's sum over its group becomes a cluster's, each other cluster standing for its m members.
        """
        size = cluster_size(len(self.pipeline), self.replicas)
        if size == 1:
            return None
        members = clusters(self.pipeline, size, generator)
        parallel = size * block_means(self.parallel, members)
        pipeline = block_means(self.pipeline, members)
        return DtfmProblem(parallel, pipeline, self.stages, self.replicas // size), members

    def explain(self, stage_of: Integers) -> DtfmCost:
        """The terms of the cost, the order of the stages and the pipelines."""
        groups, count = groups_of(stage_of, self.stages), self.stages
        hops, shortest = np.empty((count, count)), np.empty((1 << count, count))
        communication(self.parallel, self.pipeline, groups, hops, shortest)
        order, partner = path_order(hops), np.empty(self.replicas, np.int64)
        rows = [groups[order[0]]]
        for stage in order[1:]:
            bottleneck(self.pipeline, rows[-1], groups[stage], partner)
            row = np.empty_like(partner)
            row[partner] = groups[stage]
            rows.append(row)
        return DtfmCost(
            parallel=max(float(data_parallel(self.parallel, group)) for group in groups),
            pipeline=float(sum(hops[a, b] for a, b in pairwise(order))),
            stages=tuple(tuple(row.tolist()) for row in rows),
        )


@dataclass(frozen=True)
class DtfmCost:
    """Seconds. `stages` [S][n] in the order of the path; a column is one pipeline of matched devices."""

    objective: ClassVar[str] = "dtfm"
    parallel: float
    pipeline: float
    stages: tuple[tuple[int, ...], ...]

    def as_json(self) -> dict[str, float]:
        return {"data_parallel": self.parallel, "pipeline": self.pipeline}

    def sentence(self) -> str:
        parts = f"data parallelism {self.parallel:.3f} s, pipeline {self.pipeline:.3f} s"
        return f"COMM {self.parallel + self.pipeline:.3f} s: {parts}."


def dtfm_problem(scenario: Scenario, stages: int, replicas: int) -> DtfmProblem:
    """Make the problem of a scenario. Raises `ScenarioError` unless the devices are exactly what the stages need."""
    if scenario.members:
        raise ScenarioError("The objective dtfm plans single devices, 1,024 at most: use --objective noloco.")
    if scenario.devices < stages:
        raise ScenarioError(f"{scenario.devices} devices cannot fill {stages} stages: ask for fewer stages.")
    if stages * replicas != scenario.devices:
        raise ScenarioError(
            f"{stages} stages of {replicas} replicas are {stages * replicas} devices, but the scenario has "
            f"{scenario.devices}. Change --stages or --replicas."
        )
    if stages > MAX_STAGES:
        raise ScenarioError(
            f"--stages {stages}: the objective dtfm goes up to {MAX_STAGES}. Use --objective noloco."
        )
    parallel = 2 * scenario.transfer(scenario.data_parallel_bytes / replicas)
    pipeline = 2 * scenario.transfer(scenario.pipeline_bytes)
    return DtfmProblem(parallel, pipeline, stages, replicas)


def groups_of(stage_of: Integers, stages: int) -> Integers:
    """[S, n] devices of each stage, from the stage of each device [N]; all stages have n."""
    return np.argsort(stage_of, kind="stable").reshape(stages, -1)


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


# --- the cost, compiled, and annealing on it ----------------------------------------------------------


@compiled
def data_parallel(times: Floats, group: Integers) -> float:
    """max over d of Σ over e of `times`[d, e], both in `group` [n]; the diagonal of `times` [N, N] is 0."""
    slowest = 0.0
    for d in group:
        total = 0.0
        for e in group:
            total += times[d, e]
        slowest = max(slowest, total)
    return slowest


@compiled
def communication(
    parallel: Floats, pipeline: Floats, groups: Integers, hops: Floats, shortest: Floats
) -> float:
    """COMM of `groups` [S, n], in the unit of `parallel` and `pipeline` [N, N]; fills `hops` and `shortest`."""
    count = groups.shape[0]
    partner = np.empty(groups.shape[1], np.int64)
    slowest = 0.0
    for s in range(count):
        slowest = max(slowest, data_parallel(parallel, groups[s]))
        hops[s, s] = 0.0
        for t in range(s):
            hops[s, t] = hops[t, s] = bottleneck(pipeline, groups[s], groups[t], partner)
    return slowest + (shortest_path(hops, shortest) if count > 1 else 0.0)


@compiled
def anneal_swaps(
    parallel: Floats, pipeline: Floats, groups: Integers, best: Integers, least: float, temperature: float,
    steps: int, generator: np.random.Generator,
) -> float:  # fmt: skip
    """Tries `steps` swaps at one `temperature` in seconds, the Metropolis rule deciding. Returns the least cost.

    `groups` [S, n] is left at the current placement; `best` becomes the best one seen when that is below `least`.
    What a swap changes is computed, the rest is kept: of S groups it touches two, their DP terms and the 2S − 3 hops
    at either of them. DP is the cheap part and comes first: a swap that it alone rules out costs no matching.
    """
    count, replicas = groups.shape
    hops, shortest = np.empty((count, count)), np.empty((1 << count, count))
    tried, partner = np.empty((count, count)), np.empty(replicas, np.int64)
    current = communication(parallel, pipeline, groups, hops, shortest)
    if current < least:
        least, best[:] = current, groups
    slowest, tried_slowest = np.empty(count), np.empty(count)
    for s in range(count):
        slowest[s] = data_parallel(parallel, groups[s])
    for _ in range(steps):
        s, i = int(generator.integers(0, count)), generator.integers(0, replicas)
        t, j = (s + 1 + int(generator.integers(0, count - 1))) % count, generator.integers(0, replicas)
        limit = current - temperature * np.log(generator.random())
        groups[s, i], groups[t, j] = groups[t, j], groups[s, i]
        tried_slowest[:] = slowest
        tried_slowest[s], tried_slowest[t] = (
            data_parallel(parallel, groups[s]),
            data_parallel(parallel, groups[t]),
        )
        cost = tried_slowest.max()
        if cost <= limit:
            tried[:] = hops
            for u in range(count):
                if u != s:
                    tried[s, u] = tried[u, s] = bottleneck(pipeline, groups[s], groups[u], partner)
                if u != s and u != t:
                    tried[t, u] = tried[u, t] = bottleneck(pipeline, groups[t], groups[u], partner)
            cost += shortest_path(tried, shortest)
        if cost > limit:
            groups[s, i], groups[t, j] = groups[t, j], groups[s, i]
            continue
        current = cost
        hops[:], slowest[:] = tried, tried_slowest
        if cost < least:
            least, best[:] = cost, groups
    return least
