"""Thousands of rounds: every pair is equally likely, nobody is left alone, nobody waits."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import mean

import pytest
from partners.simulated_stage import PairingResult, PairingSetting, SimulatedStage
from scipy.stats import chisquare

UNEVEN = (4.0, 3.4, 2.8, 2.2, 1.6, 1.3, 1.0)


def speeds(count: int, seed: int) -> list[float]:
    """The same machines, give or take 5 %."""
    rng = Random(seed)
    return [rng.uniform(0.95, 1.05) for _ in range(count)]


def simulate(replicas: int, rounds: int, seed: int = 0) -> tuple[PairingSetting, PairingResult]:
    setting = PairingSetting(speeds(replicas, seed), inner_steps=12, step_seconds=1.0, seed=seed)
    return setting, SimulatedStage(setting).run(rounds)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "rounds"), [(3, 10_000), (4, 10_000), (7, 10_000), (64, 250)])
def test_every_pair_is_equally_likely_and_is_found_in_a_few_round_trips(replicas: int, rounds: int) -> None:
    """With 64 replicas 16,000 rounds in all; `benchmarks/pairing.py` does 10,000 of each."""
    setting, outcome = simulate(replicas, rounds)
    counts = [outcome.pairs[pair] for pair in combinations(range(replicas), 2)]
    assert chisquare(counts).pvalue > 0.01
    assert outcome.alone_twice_in_vain() == 0
    assert outcome.median_seconds_to_agree() < 3 * setting.round_trip
    left_over = replicas % 2 / replicas
    assert outcome.alone_fraction() == pytest.approx(left_over, abs=0.005)
    assert outcome.inner_steps.total() / outcome.rounds.total() == pytest.approx(12, rel=0.05)


@pytest.mark.parametrize("pace", ["steps", "time"])
def test_at_speeds_that_differ_fourfold_nobody_is_kept_waiting(pace: str) -> None:
    setting = PairingSetting(UNEVEN, pace=pace)  # type: ignore[arg-type]
    outcome = SimulatedStage(setting).run(400)
    assert max(outcome.blocked_fraction(replica) for replica in range(len(UNEVEN))) < 0.05
    averaged = sum(outcome.pairs.values()) * 2
    assert averaged > 0.8 * outcome.rounds.total()
    if pace == "time":
        assert max(outcome.rounds.values()) < 1.05 * min(outcome.rounds.values())


@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.parametrize(
    ("step_seconds", "latency"), [(0.1, (0.0, 0.0001)), (0.065, (0.01, 0.015)), (1.0, (0.02, 0.08))]
)
def test_in_rounds_of_three_steps_an_even_stage_leaves_next_to_nobody_alone(
    replicas: int, step_seconds: float, latency: tuple[float, float]
) -> None:
    """Nor does anybody wait in a circle, each for a partner that waits for the next: that costs a deadline."""
    alone, rounds = 0, 0
    for noise in (0.03, 0.2):
        setting = PairingSetting(
            speeds(replicas, 0),
            inner_steps=3,
            step_seconds=step_seconds,
            step_noise=noise,
            latency=latency,
        )
        outcome = SimulatedStage(setting).run(1600 // replicas)
        alone, rounds = alone + len(outcome.alone), rounds + outcome.rounds.total()
        assert outcome.overdue == 0
        assert outcome.one_sided <= outcome.rounds.total() / 1_000
        assert outcome.inner_steps.total() / outcome.rounds.total() == pytest.approx(3, rel=0.1)
    assert alone / rounds < 0.02


def test_uneven_rounds_of_two_steps_find_a_partner() -> None:
    settings = [PairingSetting(speeds(4, 0), inner_steps=2, step_noise=0.2, seed=seed) for seed in range(8)]
    assert mean(SimulatedStage(setting).run(400).alone_fraction() for setting in settings) < 0.03


@pytest.mark.parametrize("inner_steps", [25, 3])
def test_in_a_large_stage_the_last_ones_find_each_other_too(inner_steps: int) -> None:
    """All who are left look for a partner at once, most of them asking one that is engaged at any moment."""
    setting = PairingSetting(speeds(256, 0), inner_steps=inner_steps)
    outcome = SimulatedStage(setting).run(25)
    assert outcome.median_seconds_to_agree() < 2 * setting.round_trip
    assert outcome.late_seconds_to_agree() < 20 * setting.round_trip
    assert outcome.alone_fraction() < 0.01
    assert outcome.one_sided == 0


def test_the_same_seed_gives_the_same_rounds() -> None:
    runs = [simulate(4, 20, seed)[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
