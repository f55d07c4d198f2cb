"""Estimated links: close to the truth where most pairs are hidden, and good enough to plan with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from bootstrap.lab.placement.completion import complete_bandwidth, complete_latency
from bootstrap.lab.placement.dtfm import dtfm_problem
from bootstrap.lab.placement.methods import anneal
from bootstrap.lab.placement.scenario import Scenario
from bootstrap.lab.placement.search import Budget, run_search
from tests.placement_cases import GIVEN, given_scenario, perturbed


@dataclass(frozen=True)
class Errors:
    """Median and 90th percentile of |estimate/truth − 1| over hidden pairs."""

    median: float
    p90: float


def hidden_errors(truth: np.ndarray, completed: np.ndarray, hidden: np.ndarray) -> Errors:
    """How far `completed` [N, N] is from `truth` where `hidden`."""
    off = np.abs(completed[hidden] / truth[hidden] - 1)
    return Errors(float(np.median(off)), float(np.quantile(off, 0.9)))


def hide(count: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """A symmetric mask [N, N] of about `share` of all pairs; every device keeps one measured link at least."""
    hidden = np.zeros((count, count), bool)
    rows, columns = np.triu_indices(count, 1)
    ring = generator.permutation(count)  # these stay
    kept = {frozenset((int(a), int(b))) for a, b in zip(ring, np.roll(ring, 1), strict=True)}
    free = [k for k in range(len(rows)) if frozenset((int(rows[k]), int(columns[k]))) not in kept]
    chosen = generator.choice(free, min(len(free), round(share * len(rows))), replace=False)
    hidden[rows[chosen], columns[chosen]] = hidden[columns[chosen], rows[chosen]] = True
    return hidden


def completed(scenario: Scenario, share: float, seed: int) -> tuple[Scenario, np.ndarray]:
    """The scenario with `share` of its pairs hidden and estimated, and which ones."""
    hidden = hide(scenario.devices, share, np.random.default_rng(seed))
    latency = np.where(hidden, np.nan, scenario.latency)
    bandwidth = np.where(hidden, np.nan, scenario.bandwidth)
    np.fill_diagonal(bandwidth, 1.0)
    latency = complete_latency(latency)
    bandwidth = complete_bandwidth(bandwidth, latency)
    np.fill_diagonal(bandwidth, np.inf)
    volumes = scenario.data_parallel_bytes, scenario.pipeline_bytes
    return Scenario("completed", latency, bandwidth, *volumes), hidden


@pytest.mark.long
@pytest.mark.parametrize("name", GIVEN)
def test_four_in_five_hidden_links_are_estimated(name: str) -> None:
    truth = given_scenario(name)
    estimated, hidden = completed(truth, 0.8, 1)
    assert hidden.sum() / 2 == round(0.8 * 64 * 63 / 2)
    for true, guess in ((truth.latency, estimated.latency), (truth.bandwidth, estimated.bandwidth)):
        assert hidden_errors(true, guess, hidden).median < 0.08
        assert np.array_equal(true[~hidden], guess[~hidden])
        assert np.allclose(guess, guess.T)


def test_estimates_follow_the_links_not_the_middle() -> None:
    """Perturbed links cannot be guessed exactly; a guess by the median alone is off several times as far."""
    truth = perturbed(given_scenario("case5_worldwide"), 3)
    estimated, hidden = completed(truth, 0.8, 2)
    for true, guess in ((truth.latency, estimated.latency), (truth.bandwidth, estimated.bandwidth)):
        middle = np.full_like(true, np.median(true[~hidden]))
        assert hidden_errors(true, guess, hidden).median < 0.2
        assert hidden_errors(true, guess, hidden).median < 0.5 * hidden_errors(true, middle, hidden).median


@pytest.mark.long
def test_a_plan_on_estimates_is_nearly_as_good() -> None:
    truth = given_scenario("case5_worldwide")
    estimated, _ = completed(truth, 0.8, 1)
    real, guessed = dtfm_problem(truth, 8, 8), dtfm_problem(estimated, 8, 8)
    planned = run_search(guessed, anneal, Budget(evaluations=20_000), 0).stage_of
    generator = np.random.default_rng(0)
    random = np.median([real.cost(real.drawn(generator)) for _ in range(20)])
    assert real.cost(planned) < 0.75 * random


def test_nothing_hidden_changes_nothing() -> None:
    truth = given_scenario("case4_regional")
    assert complete_latency(truth.latency) is truth.latency
