"""DT-FM's cost: the worked cases, and brute force over every matching and every path."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.lab.placement.dtfm import DtfmProblem, dtfm_problem, path_order
from bootstrap.lab.placement.kernels import bottleneck
from bootstrap.lab.placement.scenario import Scenario
from protocol.errors import ScenarioError
from tests.placement_cases import given_scenario, random_scenario

WORKED = [
    ("case3_multidc", "blocks", 1.834000, 15.814117, 17.648117),
    ("case3_multidc", "shuffled", 6.437571, 21.058251, 27.495822),
    ("case4_regional", "blocks", 4.620000, 34.620608, 39.240608),
    ("case4_regional", "shuffled", 9.254802, 46.960818, 56.215620),
    ("case5_worldwide", "blocks", 4.620000, 54.816865, 59.436865),
    ("case5_worldwide", "shuffled", 23.844627, 73.160967, 97.005593),
]


def by_brute_force(scenario: Scenario, groups: np.ndarray) -> tuple[float, float]:
    """DP and PP, straight from equations 2 to 4."""
    n, alpha, beta = groups.shape[1], scenario.latency, scenario.bandwidth
    parallel = max(
        sum(2 * (alpha[d, e] + 8 * scenario.data_parallel_bytes / (n * beta[d, e])) for e in group if e != d)
        for group in groups
        for d in group
    )

    def hop(a: np.ndarray, b: np.ndarray) -> float:
        return min(
            max(
                2 * (alpha[d, e] + 8 * scenario.pipeline_bytes / beta[d, e])
                for d, e in zip(a, order, strict=True)
            )
            for order in permutations(b)
        )

    hops = {(s, t): hop(a, b) for s, a in enumerate(groups) for t, b in enumerate(groups) if s != t}
    pipeline = min(sum(hops[pair] for pair in pairwise(path)) for path in permutations(range(len(groups))))
    return parallel, pipeline


@pytest.mark.parametrize(("name", "placement", "parallel", "pipeline", "total"), WORKED)
def test_the_worked_cases(name: str, placement: str, parallel: float, pipeline: float, total: float) -> None:
    order = list(range(64))
    if placement == "shuffled":
        order.sort(key=lambda i: ((7 * i * i + 5 * i) % 61, i))
    stage_of = np.empty(64, np.int64)
    stage_of[order] = np.arange(64) // 8
    problem = dtfm_problem(given_scenario(name), 8, 8)
    cost = problem.explain(stage_of)
    assert cost.parallel == pytest.approx(parallel, abs=1e-6)
    assert cost.pipeline == pytest.approx(pipeline, abs=1e-6)
    assert problem.cost(stage_of) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (4, 2), (8, 1), (7, 1), (5, 1), (2, 3)]
)
def test_brute_force_finds_the_same(shape: tuple[int, int]) -> None:
    stages, replicas = shape
    for seed in range(8 if stages > 6 else 40):
        if stages * replicas < 2:
            continue
        scenario = random_scenario(stages * replicas, seed)
        problem = dtfm_problem(scenario, stages, replicas)
        stage_of = problem.drawn(np.random.default_rng(seed))
        groups = np.array([np.flatnonzero(stage_of == stage) for stage in range(stages)])
        parallel, pipeline = by_brute_force(scenario, groups)
        assert problem.cost(stage_of) == pytest.approx(parallel + pipeline, rel=1e-9)
        cost = problem.explain(stage_of)
        assert (cost.parallel, cost.pipeline) == pytest.approx((parallel, pipeline), rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 7).flatmap(lambda n: st.lists(st.integers(0, 9), min_size=n * n, max_size=n * n)))
def test_the_matching_is_the_best_and_is_a_matching(entries: list[int]) -> None:
    n = int(len(entries) ** 0.5)
    weights, everyone = np.array(entries, np.float64).reshape(n, n), np.arange(n)
    partner = np.empty(n, np.int64)
    found = bottleneck(weights, everyone, everyone, partner)
    columns = np.array(list(permutations(range(n))))
    assert found == weights[everyone, columns].max(1).min()
    assert sorted(partner) == list(range(n))
    assert max(weights[partner[j], j] for j in range(n)) == found


@pytest.mark.parametrize("count", range(2, 9))
def test_the_order_of_stages_has_the_length_of_the_shortest_path(count: int) -> None:
    for seed in range(5):
        scenario = random_scenario(count, seed)
        problem = dtfm_problem(scenario, count, 1)
        order = path_order(problem.pipeline)
        length = sum(problem.pipeline[a, b] for a, b in pairwise(order))
        assert sorted(order) == list(range(count))
        assert length == pytest.approx(problem.cost(np.arange(count)), rel=1e-12)


def test_columns_are_pipelines_over_links_no_slower_than_the_hop() -> None:
    problem = dtfm_problem(random_scenario(32, 5), 4, 8)
    cost = problem.explain(problem.drawn(np.random.default_rng(0)))
    rows = np.array(cost.stages)
    assert sorted(rows.ravel()) == list(range(32))
    slowest = sum(problem.pipeline[a, b].max() for a, b in pairwise(rows))
    assert slowest == pytest.approx(cost.pipeline)


def test_numbering_the_stages_otherwise_changes_nothing() -> None:
    problem: DtfmProblem = dtfm_problem(random_scenario(24, 1), 6, 4)
    stage_of = problem.drawn(np.random.default_rng(2))
    assert problem.cost(5 - stage_of) == pytest.approx(problem.cost(stage_of), rel=1e-12)


@pytest.mark.parametrize(
    ("stages", "replicas", "said"),
    [(16, 1, "8 devices cannot fill 16"), (4, 3, "12 devices, but the scenario has 8"), (2, 2, "has 8")],
)
def test_devices_that_do_not_fill_the_stages(stages: int, replicas: int, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        dtfm_problem(random_scenario(8, 0), stages, replicas)


def test_more_stages_than_an_exact_path_can_have() -> None:
    with pytest.raises(ScenarioError, match="up to 16"):
        dtfm_problem(random_scenario(20, 0), 20, 1)
