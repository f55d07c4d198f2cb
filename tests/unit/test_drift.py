"""The predicted spread follows the noise that pairs show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from node.model.outer import OuterSettings, stationary_variance
from node.rounds.round_statistics import SpreadModel

SETTINGS = OuterSettings(0.5, 0.7, 0.7)


@pytest.mark.parametrize("replicas", [2, 3, 4, 7, 64])
def test_the_prediction_settles_where_the_theory_says(replicas: int) -> None:
    model, noise = SpreadModel(SETTINGS), 0.03
    for _ in range(60):
        predicted = model.round_ended(replicas, 2 * noise**2, is_settled=False)
    assert predicted == pytest.approx(
        math.sqrt(stationary_variance(SETTINGS, replicas, noise_variance=noise**2)), rel=1e-3, abs=1e-12
    )


def test_a_newcomer_to_an_old_stage_predicts_what_is_there_already() -> None:
    grown, settled = SpreadModel(SETTINGS), SpreadModel(SETTINGS)
    first = settled.round_ended(8, 2.0, is_settled=True)
    young = grown.round_ended(8, 2.0, is_settled=False)
    assert young is not None
    assert first is not None
    assert young < first
    assert first == pytest.approx(math.sqrt(stationary_variance(SETTINGS, 8)), rel=1e-9)


def test_nothing_is_predicted_of_nothing() -> None:
    model = SpreadModel(SETTINGS)
    assert model.round_ended(8, None, is_settled=False) is None
    assert model.round_ended(1, 1.0, is_settled=False) is None


def test_the_prediction_agrees_with_pairs_of_noisy_replicas() -> None:
    """True spread, the estimate of the model from Δ differences alone: within 10 %."""
    rng = np.random.default_rng(3)
    replicas, size, noise = 8, 4000, 0.01
    phi, delta = np.zeros((replicas, size)), np.zeros((replicas, size))
    model = SpreadModel(SETTINGS)
    for _ in range(40):
        progress = rng.standard_normal((replicas, size)) * noise
        order = rng.permutation(replicas)
        for i, j in order.reshape(-1, 2):
            z = SETTINGS.beta * progress[[i, j]] + SETTINGS.gamma * phi[[i, j]]
            for replica in (i, j):
                delta[replica] = SETTINGS.alpha * delta[replica] + z.mean(0) - SETTINGS.gamma * phi[replica]
        phi += delta
        seen = float(np.square(progress[order[0]] - progress[order[1]]).mean())
        predicted = model.round_ended(replicas, seen, is_settled=False)
    true = math.sqrt(np.square(phi - phi.mean(0)).mean())
    assert predicted == pytest.approx(true, rel=0.1)
