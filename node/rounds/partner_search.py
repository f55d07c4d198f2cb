"""Whom to ask for one round, and what is asked and answered. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from node.rounds.agreement import Pair
from node.rounds.meeting import Meeting
from protocol.transport.base import PeerId

ASKED_AT_MOST = 128  # in one round: in a large stage, one that is free still is found long before


@dataclass(frozen=True)
class Proposal:
    """What is asked: to be this pair, so that a round ends within `mine`, as it looked at `sent_at`."""

    pair: Pair
    mine: Meeting
    sent_at: float


@dataclass(frozen=True)
class Refusal:
    code: str
    engaged_with: PeerId | None = None  # the partner in the round asked for: it need not be asked, too


class PartnerSearch:
    """Mutable state: who has refused and until when, who is known to have a partner, whether to sit out."""

    def __init__(self) -> None:
        self._refused: dict[PeerId, float] = {}  # until which inner step
        self.engaged: list[PeerId] = []
        self.sits_out = False  # asked to be the one that is left over

    def willing(self, candidates: Sequence[PeerId], steps: int) -> list[PeerId]:
        """Those that may agree, after so many inner steps."""
        if len(self._refused) >= ASKED_AT_MOST:
            return []
        barred = {peer for peer, until in self._refused.items() if until > steps}
        return [peer for peer in candidates if peer not in barred]

    def bar(self, peer: PeerId, until: float = math.inf) -> None:
        self._refused[peer] = until

    def note(self, peer: PeerId, refusal: Refusal, retry_at: int) -> None:
        """`peer` refused; being out of step may be over at inner step `retry_at`."""
        if refusal.code == "out-of-step":  # both sides' windows move with time
            self.bar(peer, retry_at)
        elif refusal.code != "busy":  # that one may be free again in a moment
            self.bar(peer)
        if refusal.engaged_with is not None:
            self.bar(refusal.engaged_with)
            self.engaged += [peer, refusal.engaged_with]

    def forget(self) -> None:
        """Everyone may be asked again: time has passed."""
        self._refused.clear()
