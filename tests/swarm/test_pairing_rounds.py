"""Thousands of rounds: every pair is equally likely, nobody is left alone, nobody waits."""

from __future__ import annotations

from itertools import combinations
from random import Random

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


@pytest.mark.long_but("64-250")
@pytest.mark.parametrize(
    ("replicas", "rounds"), [(3, 10_000), (4, 10_000), (7, 10_000), pytest.param(64, 250, id="64-250")]
)
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


def test_the_same_seed_gives_the_same_rounds() -> None:
    runs = [simulate(4, 20, seed)[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
