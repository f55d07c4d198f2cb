"""The spread of simulated replicas: a few numbers stand for the weights, moved by the daemon's own outer step.

A round's progress is noise of variance 1 for each replica and number, so that the theory of `node.model.outer` says
what the spread should be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from node.model.outer import OuterSettings, contribution, outer_step, stationary_variance
from protocol.run.manifest import Outer

NUMBERS = 8  # of a replica
SETTINGS = OuterSettings(*Outer().coefficients)


class Opinion:
    """A few numbers that stand for a simulated replica's weights.

    Mutable state: φ, δ and θ of a replica, `NUMBERS` each.
    """

    def __init__(self, seed: Sequence[int], donor: Opinion | None = None) -> None:
        """Start from a donor's numbers, as a newcomer does, or from zero."""
        self._rng = np.random.default_rng(seed)
        self.phi: torch.Tensor = torch.zeros(NUMBERS) if donor is None else donor.phi.clone()
        self._delta: torch.Tensor = torch.zeros(NUMBERS) if donor is None else donor._delta.clone()
        self._train()

    def _train(self) -> None:
        """Draw the progress of the round that begins."""
        noise = self._rng.standard_normal(NUMBERS, dtype=np.float32)
        self._theta = self.phi + torch.from_numpy(noise)

    def contribution(self) -> torch.Tensor:
        return contribution(self._theta, self.phi, SETTINGS)

    def end_round(self, partners: Any) -> None:
        """End a round with the partner's contribution, or alone."""
        z = self.contribution()
        outer_step(self.phi, self._delta, z if partners is None else (z + partners) / 2, SETTINGS)
        self._train()


def spread_of(opinions: Sequence[Opinion]) -> float:
    """Root mean square of the deviations from the mean."""
    phi = np.stack([opinion.phi.numpy() for opinion in opinions])
    return float(phi.var(axis=0).mean() ** 0.5)


def expected_spread(replicas: int) -> float:
    """Expected spread of so many replicas, long after the start."""
    return math.sqrt(stationary_variance(SETTINGS, replicas))
