"""Gives back what averaging takes from the length of a step. Pure.

An inner optimizer that normalises, as Muon and Adam do, makes every replica's progress Δ as long as its rate says,
and most of it is noise of the replica's own batches. The mean over N replicas keeps what they share, and little of
the rest: with c the cosine of two of them, it is √(c + (1 − c)/N) as long as one is. All-reduce averages before it
normalises, so its steps stay long. So each replica multiplies its own Δ, before others average with it, by

    (c + (1 − c)/N)^(−η/2)                                                              (1)

with η = `outer.gain`: 0 gives back nothing, 1 everything. A pair that averages does not bring in N replicas at once,
and what its members do not share drives them apart in the meantime, so that η = 1 is too much. c is the median over
the last partners. Where replicas agree, as at the beginning of a run, and where nobody else is there, it is 1.
"""

from __future__ import annotations

import math
from statistics import median

import torch

from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId

PARTNERS = 16  # last ones that count, one vote each
LEAST_MEETINGS = 3
NEWEST = 0.25  # of a partner's vote is its last meeting's: a cosine of a sample is a rough one
# A peer that fills the stage with made-up records makes N as large as it likes. Measurements end at 16 replicas.
LONGEST = 2.0


def cosine(own: torch.Tensor, others: torch.Tensor) -> float:
    """The cosine of two tensors [entries]; 0 where one of them is 0 or not finite."""
    product, squares = torch.dot(own, others), torch.dot(own, own) * torch.dot(others, others)
    value = float(product / squares.sqrt())
    return min(1.0, max(-1.0, value)) if math.isfinite(value) else 0.0


class Gain:
    """Knows how much of their progress two replicas of a stage usually share.

    Mutable state: the cosines of the last partners, and how many meetings there were.
    """

    def __init__(self, returned: float) -> None:
        """`returned` is η, from 0 to 1."""
        self._returned = returned
        self._shared = PeerTable[float](PARTNERS)
        self._meetings = 0

    def met(self, peer: PeerId, shared: float) -> None:
        """Record the cosine of this replica's progress and a partner's."""
        before = self._shared.get(peer, shared)
        self._shared[peer] = before + NEWEST * (shared - before)
        self._meetings += 1

    def factor(self, replicas: int) -> float:
        """Return what to multiply Δ by in a stage of N = `replicas`, by eq. (1): from 1 to `LONGEST`.

        1 where nothing is given back, or until `LEAST_MEETINGS` meetings with partners.
        """
        if not self._returned or replicas < 2 or self._meetings < LEAST_MEETINGS:
            return 1.0
        shared = min(1.0, max(0.0, median(self._shared.values())))
        return float(min(LONGEST, (shared + (1.0 - shared) / replicas) ** (-self._returned / 2)))
