"""Plans for a swarm that runs: as good as the one found, with no move that does not pay."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.lab.placement.live_plan import AS_GOOD, with_fewest_moves
from bootstrap.lab.placement.noloco import Training, noloco_problem
from bootstrap.lab.placement.scenario import scenario_from


def test_nobody_moves_when_things_are_as_good_as_they_can_be() -> None:
    current = np.array([0, 0, 1, 1])
    kept = with_fewest_moves(lambda p: 1.0, current, np.array([1, 1, 0, 0]), 2)
    assert kept.tolist() == current.tolist()


@pytest.mark.long
@given(seed=st.integers(0, 200))
def test_what_comes_out_costs_no_more_and_moves_no_more(seed: int) -> None:
    generator = np.random.default_rng(seed)
    latency = generator.uniform(1, 100, (6, 6))
    contents = {
        "latency_ms": (latency + latency.T).tolist(),
        "bandwidth_gbps": np.full((6, 6), 1.0).tolist(),
        "volumes": {"data_parallel_bytes": 1e6, "pipeline_bytes": 1e6},
    }
    problem = noloco_problem(scenario_from(contents), 3, Training())
    placements = [np.array(p) for p in set(permutations([0, 0, 1, 1, 2, 2]))]
    best = min(placements, key=problem.cost)
    current = placements[seed % len(placements)]
    kept = with_fewest_moves(problem.cost, current, best, 3)
    assert problem.cost(kept) <= AS_GOOD * problem.cost(best)
    assert (kept != current).sum() <= (best != current).sum()


def test_stages_in_the_opposite_order_are_the_same_plan() -> None:
    cost = {(0, 0, 1, 2): 2.0, (2, 2, 1, 0): 1.0, (0, 1, 1, 2): 1.0}
    current, found = np.array([0, 0, 1, 2]), np.array([2, 1, 1, 0])
    kept = with_fewest_moves(
        lambda p: cost.get(tuple(p.tolist()), 1.0 if p is found else 9.0), current, found, 3
    )
    assert kept.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("may_serve", "said"), [([[0], [0], [2]], "stage 2"), ([[0], [0], []], r"may_serve\[2\]")]
)
def test_stages_that_devices_may_serve_are_checked(may_serve: list[list[int]], said: str) -> None:
    matrix = np.full((3, 3), 1.0).tolist()
    volumes = {"data_parallel_bytes": 1e6, "pipeline_bytes": 1e6}
    contents = {"latency_ms": matrix, "bandwidth_gbps": matrix, "volumes": volumes, "may_serve": may_serve}
    with pytest.raises(Exception, match=said):
        noloco_problem(scenario_from(contents), 2, Training())


@pytest.mark.long
def test_a_device_is_planned_only_where_it_may_serve() -> None:
    matrix = np.full((4, 4), 1.0).tolist()
    volumes = {"data_parallel_bytes": 1e6, "pipeline_bytes": 1e6}
    may_serve = [[1], [0, 1], [0, 1], [0]]
    contents = {"latency_ms": matrix, "bandwidth_gbps": matrix, "volumes": volumes, "may_serve": may_serve}
    problem = noloco_problem(scenario_from(contents), 2, Training())
    assert np.isinf(problem.cost(np.array([0, 0, 1, 1])))
    for seed in range(10):
        placement = problem.drawn(np.random.default_rng(seed))
        assert (placement[0], placement[3]) == (1, 0)
