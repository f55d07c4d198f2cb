"""The predicted spread follows the noise that pairs show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from node.model.outer import OuterSettings, stationary_variance
from node.rounds.round_statistics import SpreadModel, spread_from_variances, variance_from_distance

SETTINGS = OuterSettings(0.5, 0.7, 0.7)


@pytest.mark.parametrize("replicas", [2, 3, 4, 7, 64])
def test_the_prediction_settles_where_the_theory_says(replicas: int) -> None:
    model, noise = SpreadModel(), 0.03
    for _ in range(60):
        predicted = model.round_ended(SETTINGS, replicas, 2 * noise**2, is_settled=False)
    assert predicted == pytest.approx(
        math.sqrt(stationary_variance(SETTINGS, replicas, noise_variance=noise**2)), rel=1e-3, abs=1e-12
    )


def test_a_newcomer_to_an_old_stage_predicts_what_is_there_already() -> None:
    grown, settled = SpreadModel(), SpreadModel()
    first = settled.round_ended(SETTINGS, 8, 2.0, is_settled=True)
    young = grown.round_ended(SETTINGS, 8, 2.0, is_settled=False)
    assert young is not None
    assert first is not None
    assert young < first
    assert first == pytest.approx(math.sqrt(stationary_variance(SETTINGS, 8)), rel=1e-9)


def test_nothing_is_predicted_of_nothing() -> None:
    model = SpreadModel()
    assert model.round_ended(SETTINGS, 8, None, is_settled=False) is None
    assert model.round_ended(SETTINGS, 1, 1.0, is_settled=False) is None


def test_the_prediction_agrees_with_pairs_of_noisy_replicas() -> None:
    """True spread, the estimate of the model from Δ differences alone: within 10 %."""
    rng = np.random.default_rng(3)
    replicas, size, noise = 8, 4000, 0.01
    phi, delta = np.zeros((replicas, size)), np.zeros((replicas, size))
    model = SpreadModel()
    for _ in range(40):
        progress = rng.standard_normal((replicas, size)) * noise
        order = rng.permutation(replicas)
        for i, j in order.reshape(-1, 2):
            z = SETTINGS.beta * progress[[i, j]] + SETTINGS.gamma * phi[[i, j]]
            for replica in (i, j):
                delta[replica] = SETTINGS.alpha * delta[replica] + z.mean(0) - SETTINGS.gamma * phi[replica]
        phi += delta
        seen = float(np.square(progress[order[0]] - progress[order[1]]).mean())
        predicted = model.round_ended(SETTINGS, replicas, seen, is_settled=False)
    true = math.sqrt(np.square(phi - phi.mean(0)).mean())
    assert predicted == pytest.approx(true, rel=0.1)


def after_a_falling_rate(seed: int) -> tuple[float, float, float]:
    """Mean squared deviations of φ: as it is, as estimated, and the mean of the last meetings' distances."""
    rng = np.random.default_rng(seed)
    replicas, size = 16, 2000
    phi, delta, kept = np.zeros((replicas, size)), np.zeros((replicas, size)), np.zeros((replicas, size))
    model, variances, past = SpreadModel(), list[tuple[float, float]](), list[float]()
    for noise in np.geomspace(0.1, 0.01, 30):
        kept = 0.5 * kept + rng.standard_normal(
            (replicas, size)
        )  # each replica's progress resembles its last
        progress = kept * noise
        order = rng.permutation(replicas)
        one, other = order[:2]
        before = model.variance
        distance = float(np.square(phi[one] - phi[other]).mean())
        for i, j in order.reshape(-1, 2):
            z = SETTINGS.beta * progress[[i, j]] + SETTINGS.gamma * phi[[i, j]]
            for replica in (i, j):
                delta[replica] = SETTINGS.alpha * delta[replica] + z.mean(0) - SETTINGS.gamma * phi[replica]
        phi += delta
        model.round_ended(SETTINGS, replicas, float(np.square(progress[one] - progress[other]).mean()), False)
        past = [*past[-7:], distance]
        variances = [*variances[-7:], (variance_from_distance(distance, replicas), before)]
    estimate = spread_from_variances(variances, model.variance)
    assert estimate is not None
    return float(np.square(phi - phi.mean(0)).mean()), estimate**2, sum(past) / len(past) / 2


def test_while_the_learning_rate_falls_the_meetings_of_before_are_not_those_of_now() -> None:
    """The noise falls tenfold in thirty rounds, and each replica's progress resembles its last."""
    true, estimated, past = np.sqrt(np.mean([after_a_falling_rate(seed) for seed in range(12)], axis=0))
    assert estimated == pytest.approx(true, rel=0.1)
    assert past > 1.3 * true


def test_replicas_that_always_meet_are_as_far_as_they_were_found() -> None:
    assert spread_from_variances([], 1.0) is None
    assert spread_from_variances([(4.0, 0.0), (16.0, 0.0)], 0.0) == pytest.approx(math.sqrt(10))
    assert spread_from_variances([(4.0, 2.0), (8.0, 4.0)], 1.0) == pytest.approx(math.sqrt(2))
