"""How far the replicas of a stage are apart, estimated from the distances of the pairs that meet anyway."""

from __future__ import annotations

import math
from collections import deque

DISTANCES = 8  # pair distances behind the estimate


class SpreadEstimate:
    """Mutable state: the last mean squared differences of φ to a random partner."""

    def __init__(self) -> None:
        self._squared_distances: deque[float] = deque(maxlen=DISTANCES)

    def note(self, squared_distance: float) -> None:
        """The mean square of φ_i − φ_j over parameters, or over a sample of them."""
        self._squared_distances.append(squared_distance)

    def value(self, replicas: int) -> float:
        return spread_from_distances(list(self._squared_distances), max(2, replicas))


def spread_from_distances(squared_distances: list[float], replicas: int) -> float:
    """Root mean squared deviation of `replicas` replicas from their mean, over replicas and parameters.

    For a random pair of N, E‖φ_i − φ_j‖²/P = 2N/(N − 1) · σ².
    """
    mean = sum(squared_distances) / len(squared_distances)
    return math.sqrt(mean * (replicas - 1) / (2 * replicas))
