"""Gives back what averaging takes from the length of a step. Pure.

An inner optimizer that normalises, as Muon and Adam do, makes every replica's progress Δ as long as its rate says,
and most of it is noise of the replica's own batches. The mean over N replicas keeps what they share, and little of
the rest: with c the cosine of two of them, it is √(c + (1 − c)/N) as long as one is. All-reduce averages before it
normalises, so its steps stay long. So each replica multiplies its own Δ, before others average with it, by

    (c + (1 − c)/N)^(−η/2)                                                              (1)

with η = `outer.gain`: 0 gives back nothing, 1 everything. A pair that averages does not bring in N replicas at once,
and what its members do not share drives them apart in the meantime, so that η = 1 is too much. c is the median of
the last meetings. Where replicas agree, as at the beginning of a run, and where nobody else is there, it is 1.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch

MEETINGS = 16  # last ones that count, one vote each
LEAST_MEETINGS = 3
# Whoever fills the stage with records makes N as large as it likes; and nobody measured more than 16 replicas.
LONGEST = 2.0


def cosine(own: torch.Tensor, others: torch.Tensor) -> float:
    """The cosine of two tensors [entries]; 0 where one of them is 0 or not finite."""
    product, squares = torch.dot(own, others), torch.dot(own, own) * torch.dot(others, others)
    value = float(product / squares.sqrt())
    return value if -1.0 <= value <= 1.0 else 0.0


class Gain:
    """Knows how much of their progress two replicas of a stage usually share.

    Mutable state: the cosines of the last meetings.
    """

    def __init__(self, returned: float) -> None:
        """`returned` is η, from 0 to 1."""
        self._returned = returned
        self._shared = deque[float](maxlen=MEETINGS)

    def met(self, shared: float) -> None:
        """Note the cosine of the own progress and a partner's."""
        self._shared.append(shared)

    def factor(self, replicas: int) -> float:
        """By eq. (1), for a stage of so many replicas, `LONGEST` at most; 1 until enough partners were met."""
        if not self._returned or replicas < 2 or len(self._shared) < LEAST_MEETINGS:
            return 1.0
        shared = min(1.0, max(0.0, median(self._shared)))
        return float(min(LONGEST, (shared + (1.0 - shared) / replicas) ** (-self._returned / 2)))
