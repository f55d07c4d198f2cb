"""A batch in DT-FM's setting: closed forms where there are some, and the order that the paper's table has."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from placements.batch_time import Batch, batch_seconds, pipeline_ends

from bootstrap.lab.placement.dtfm import dtfm_problem
from bootstrap.lab.placement.methods import anneal
from bootstrap.lab.placement.search import Budget, run_search
from tests.placement_cases import GIVEN, given_scenario


def ends(stages: int, microbatches: int, *, latency: float, occupied: float, overlap: bool) -> np.ndarray:
    square = 1.0 - np.eye(stages)
    found: np.ndarray = pipeline_ends(
        np.arange(stages), latency * square, occupied * square, microbatches, 1.0, 2.0, overlap
    )
    return found


def test_without_a_network_it_is_the_pipelines_bubble() -> None:
    """(M + S − 1) forward and as many backward passes."""
    for overlap in (True, False):
        assert ends(4, 10, latency=0, occupied=0, overlap=overlap)[0] == pytest.approx(13 * 3)


def test_latency_is_paid_once_each_way_and_hop() -> None:
    assert ends(3, 10, latency=5.0, occupied=0, overlap=True)[0] == pytest.approx(12 * 3 + 2 * 2 * 5)


def test_slow_links_hide_behind_compute_only_with_overlap() -> None:
    assert ends(2, 50, latency=0, occupied=0.9, overlap=True)[0] == pytest.approx(51 * 3 + 2 * 0.9)
    assert ends(2, 50, latency=0, occupied=0.9, overlap=False)[0] > 50 * (3 + 2 * 0.9) - 5


@pytest.mark.long
@pytest.mark.parametrize("name", GIVEN)
def test_scheduling_and_overlap_both_help(name: str) -> None:
    scenario = given_scenario(name)
    problem = dtfm_problem(scenario, 8, 8)
    planned = problem.explain(run_search(problem, anneal, Budget(evaluations=5000), 0).stage_of).stages
    generator, batch = np.random.default_rng(0), Batch()
    random = [generator.permutation(64).reshape(8, 8) for _ in range(5)]
    for overlap in (True, False):
        shuffled = mean(batch_seconds(scenario, rows, batch, overlap) for rows in random)
        assert batch_seconds(scenario, planned, batch, overlap) < 0.9 * shuffled
    assert batch_seconds(scenario, planned, batch, True) < batch_seconds(scenario, planned, batch, False)


def test_the_work_of_a_batch_is_that_of_its_weights_and_tokens() -> None:
    assert Batch(sequences=1024).work() == pytest.approx(6 * 1.31e9 * 1024 * 2048, rel=0.2)
