"""How far the replicas of a stage are apart, estimated from the distances of the pairs that meet anyway."""

from __future__ import annotations

import math
from collections import deque

import torch

DISTANCES = 8  # pair distances behind the estimate


class SpreadEstimate:
    """Mutable state: the last mean squared differences of φ to a random partner."""

    def __init__(self) -> None:
        self._squared_distances: deque[float] = deque(maxlen=DISTANCES)

    def note(self, own: torch.Tensor, partners: torch.Tensor) -> None:
        """The same entries of both replicas' φ."""
        self._squared_distances.append(float((own - partners).square().mean()))

    def value(self, replicas: int) -> float:
        return spread_from_distances(list(self._squared_distances), max(2, replicas))


def spread_from_distances(squared_distances: list[float], replicas: int) -> float:
    """Root mean squared deviation of `replicas` replicas from their mean, over replicas and parameters.

    For a random pair of N, E‖φ_i − φ_j‖²/P = 2N/(N − 1) · σ².
    """
    mean = sum(squared_distances) / len(squared_distances)
    return math.sqrt(mean * (replicas - 1) / (2 * replicas))
