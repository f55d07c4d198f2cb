"""How far apart replicas should be by theory. Pure.

The theory is `node.model.outer.covariance_recursion`, fed with the noise s² of a round's progress as pairs show it:
for independent noise E‖Δ_i − Δ_j‖²/P = 2·s².
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from node.model.outer import Matrix, OuterSettings, covariance_recursion, stationary_covariance

NOISES = 8  # measurements of s² behind its estimate, as many as distances behind the spread's


class SpreadModel:
    """Mutable state: the last estimates of s², and Σ over the replicas as it should be now."""

    def __init__(self, settings: OuterSettings) -> None:
        self._settings = settings
        self._noises: deque[float] = deque(maxlen=NOISES)
        self._sigma: Matrix = np.zeros((2, 2))

    @property
    def is_fed(self) -> bool:
        """Whether the noise is known at all."""
        return bool(self._noises)

    def round_ended(self, replicas: int, squared_difference: float | None, is_settled: bool) -> float | None:
        """The predicted spread after one more round of a stage of `replicas`; None before anything is known.

        `squared_difference` is the mean square of Δ_i − Δ_j over parameters, None in a round without a
        partner. `is_settled` says that this replica came to a stage which had long been training: Σ is
        then taken to be stationary instead of grown from zero.
        """
        if squared_difference is not None:
            self._noises.append(squared_difference / 2)
        if not self._noises or replicas < 2:
            return None
        noise = sum(self._noises) / len(self._noises)
        if is_settled and not self._sigma.any():
            stationary = stationary_covariance(self._settings, replicas, noise_variance=noise)
            self._sigma = stationary if np.isfinite(stationary).all() else self._sigma
        self._sigma = covariance_recursion(self._sigma, self._settings, replicas, noise_variance=noise)
        return math.sqrt(max(0.0, float(self._sigma[0, 0])))
