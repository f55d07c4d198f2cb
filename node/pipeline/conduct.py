"""How the peers of the next stage behave: whose answers are worthless, and who is left alone for it.

Each node keeps its own record and believes nobody else's. A gradient out of all proportion to those that the same
stage gave before is worthless, finite as it is: clipped to its norm, the others of its batch vanish.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

from node.context import Context
from node.membership.quarantine import Quarantine
from node.model.inner import LARGEST_NORM
from protocol.errors import CodecError, Refused
from protocol.transport.base import PeerId

CONTENT = frozenset({"non-finite", "bad-shape"})  # refusals for what a microbatch holds: no other time helps
HISTORY = 64
ENOUGH = 5  # gradients before one is judged
PROPORTION = 1_000.0  # times the median; honest norms of a run differ by less than a tenth of it


class Norms:
    """Mutable state: the last `HISTORY` norms.

    The median holds while fewer than half of them lie. What is out of proportion enters as the most that is not, so
    that a scale that has changed for good is accepted after half a history.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def is_outlying(self, norm: float) -> bool:
        """Judge the norm of a gradient, finite, and remember it."""
        most = PROPORTION * median(self._norms) if len(self._norms) >= ENOUGH else 0.0
        self._norms.append(min(norm, most) if most else norm)
        return norm > most > 0


class Conduct:
    """Mutable state: the norms of past gradients, and which peers offended how often."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._norms = Norms()
        self._quarantine = Quarantine()

    def trusted(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """Those that are not left alone; all of them rather than nobody."""
        now = self._now()
        return [peer for peer in peers if not self._quarantine.holds(peer, now)] or list(peers)

    def require_proportion(self, gradient: torch.Tensor) -> None:
        """Raises `CodecError` for a gradient that is not finite, or far out of proportion to earlier ones."""
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32).item()
        if not math.isfinite(norm):
            raise CodecError("the gradient is not finite")
        if norm > LARGEST_NORM or self._norms.is_outlying(norm):
            raise CodecError(f"the gradient has a norm of {norm:.3g}, out of all proportion")

    def did_well(self, peer: PeerId) -> None:
        self._context.view.trust(peer)
        self._quarantine.note(peer, False, self._now())

    def offended(self, peer: PeerId) -> None:
        """Its answer was worthless: it gets no microbatch for a while, after repeats for long."""
        context = self._context
        context.view.suspect(peer)
        if self._quarantine.note(peer, True, self._now()):
            context.events.warn(
                f"Peer {peer[-8:]} keeps giving worthless answers; it gets no microbatches from here for a while. "
                "If it is yours, start it again.",
                "left-alone",
                peer=peer,
            )

    def overruled(self, refusals: dict[PeerId, Refused]) -> None:
        """Another peer did what these refused for its content."""
        for peer in refusals:
            self.offended(peer)

    def _now(self) -> float:
        return self._context.view.elapsed()
