"""What past meetings teach about the next: how far partners usually are, and how much they agree. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.transport.base import PeerId

# The last so many partners count, one vote each however often they were met, and a median follows half of them: it
# keeps up with a run whose distances change within a few rounds, and a minority of attackers cannot move it beyond
# what the honest ones say.
VOTES = 9
LEAST_VOTES = 3  # the expected ratio votes in place of partners not met yet
# A vote counts at most this many limits, so that even a majority can raise the radius only step by step.
GROWTH = 2.0
LEAST_AGREEMENTS = 5
USEFUL_AGREEMENT = 0.2  # with less, honest replicas oppose one another by chance, as late in training
OPPOSITE = -0.5  # of the usual agreement; a flipped Δ has −1
OUTLIER = 4.0  # standard deviations below the usual agreement
DEVIATIONS = 1.4826  # standard deviations of a normal distribution in its median absolute deviation


class History:
    """Mutable state: of each of the last partners, the distances in units of own progress and the agreement."""

    def __init__(self, expected: NDArray[np.float64]) -> None:
        self._expected = expected
        self._votes: dict[PeerId, tuple[NDArray[np.float64], float]] = {}  # the latest last

    def usual_ratios(self) -> NDArray[np.float64]:
        """Median of the votes of each block, as long as `expected`."""
        votes = [ratios for ratios, _ in self._votes.values()]
        votes += [self._expected] * (LEAST_VOTES - len(votes))
        median: NDArray[np.float64] = np.median(np.stack(votes), axis=0)
        return median

    def least_agreement(self) -> float:
        """Below it a partner is opposed: it wants the opposite of the others, and is an outlier among them."""
        agreements = np.array([agreement for _, agreement in self._votes.values()])
        if len(agreements) < LEAST_AGREEMENTS or np.median(agreements) < USEFUL_AGREEMENT:
            return -np.inf
        median = np.median(agreements)
        deviation = DEVIATIONS * np.median(np.abs(agreements - median))
        return float(min(OPPOSITE * median, median - OUTLIER * deviation))

    def note(
        self, peer: PeerId, ratios: NDArray[np.float64], limits: NDArray[np.float64], agreement: float
    ) -> None:
        """A meeting: distances by own progress, what was allowed of them, and the cosine."""
        self._votes.pop(peer, None)
        self._votes[peer] = np.minimum(ratios, GROWTH * limits), agreement
        if len(self._votes) > VOTES:
            del self._votes[next(iter(self._votes))]
