"""Who averages with whom: a handshake between two replicas, with no common view and no coordinator. Pure.

At a random moment in the first half of its round a replica without a partner proposes to the others in random
order. A replica accepts the first proposal that comes while it is free and whose round can end when its own
can. Agreeing that early makes all pairs equally likely; agreeing only when rounds end would keep pairing those
that ended their last round together.

The round ends together: nominally after k inner steps, but a replica that is behind may end its round from
k·(1 − window) steps on, and one that is ahead goes on training until k·(1 + window). A replica that has found
nobody ends its round alone, and nobody waits. It does so after a random number of steps between these two: its
rounds then shift against the others' until they meet again, while a fixed number would keep it out of step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocol.transport.base import PeerId


class Phase(Enum):
    FREE = "free"
    PROPOSING = "proposing"  # waiting for an answer
    AGREED = "agreed"  # the exchange comes when both rounds may end


@dataclass(frozen=True)
class Pair:
    partner: PeerId
    name: str  # of this exchange, known to both


@dataclass(frozen=True)
class Meeting:
    """In how many seconds a replica's round may end, from the earliest to the latest."""

    opens_in: float
    ends_in: float

    def overlaps(self, other: Meeting) -> bool:
        return self.opens_in <= other.ends_in and other.opens_in <= self.ends_in


class Pairing:
    """Mutable state: the phase, the pair proposed or agreed, who refused, whether the partner can end."""

    def __init__(self, me: PeerId, inner_steps: int, window: float, rng: random.Random) -> None:
        self.me = me
        self.nominal = inner_steps
        self.opens_at = max(1, round(inner_steps * (1 - window)))
        self.ends_at = max(inner_steps, round(inner_steps * (1 + window)))
        self._rng = rng
        self.begin_round()

    def begin_round(self) -> None:
        self.phase: Phase = Phase.FREE
        self.pair: Pair | None = None
        self.partner_ready = False
        self._alone_at = self._rng.randint(self.opens_at, self.ends_at)
        self._propose_at = self._rng.randint(1, max(1, self.nominal // 2))
        self._refused: set[PeerId] = set()

    def meeting(self, steps: int, step_seconds: float) -> Meeting:
        """When this round may end, given its inner steps so far and the time that one takes."""
        return Meeting(
            max(0, self.opens_at - steps) * step_seconds, max(0, self.ends_at - steps) * step_seconds
        )

    # --- finding a partner --------------------------------------------------------------------

    def may_propose(self, steps: int) -> bool:
        return self.phase is Phase.FREE and steps >= self._propose_at

    def propose(self, candidates: Sequence[PeerId]) -> Pair | None:
        """One of the candidates that have not refused in this round, uniformly at random."""
        if self.phase is not Phase.FREE:
            return None
        willing = [peer for peer in candidates if peer != self.me and peer not in self._refused]
        if not willing:
            return None
        self.phase = Phase.PROPOSING
        self.pair = Pair(self._rng.choice(willing), f"{self._rng.getrandbits(128):032x}")
        return self.pair

    def answered(self, proposed: Pair, refusal: str | None) -> None:
        """The answer to an own proposal, None for yes. A lost answer is a refusal "lost"."""
        if self.phase is not Phase.PROPOSING or self.pair != proposed:
            return  # the other's crossing proposal was agreed on meanwhile
        if refusal is None:
            self.phase = Phase.AGREED
            return
        self.phase, self.pair = Phase.FREE, None
        if refusal != "busy":  # it may be free again in a moment
            self._refused.add(proposed.partner)

    def on_proposal(self, pair: Pair, theirs: Meeting, steps: int, step_seconds: float) -> str | None:
        """Another replica proposes. None accepts; otherwise the code of the refusal."""
        crossing = (
            self.phase is Phase.PROPOSING and self.pair is not None and self.pair.partner == pair.partner
        )
        if self.phase is Phase.AGREED:
            return "engaged"
        if self.phase is Phase.PROPOSING and not (crossing and pair.partner < self.me):
            return "busy"  # of two proposals that cross, the smaller peer id's counts
        if not theirs.overlaps(self.meeting(steps, step_seconds)):
            return "out-of-step"
        self.phase, self.pair = Phase.AGREED, pair
        return None

    def forget_refusals(self) -> None:
        """Everyone may be asked again: time has passed."""
        self._refused.clear()

    # --- ending the round ---------------------------------------------------------------------

    def on_ready(self, name: str) -> bool:
        """The partner's round has come to its end; False for a pair that is not ours."""
        if self.pair is None or self.pair.name != name:
            return False
        self.partner_ready = True
        return True

    def is_ready(self, steps: int) -> bool:
        """Whether to tell the partner that this round can end."""
        earliest = self.opens_at if self.partner_ready else self.nominal
        return self.phase is Phase.AGREED and steps >= earliest

    def must_end(self, steps: int) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        if self.phase is Phase.AGREED:
            return steps >= self.ends_at or (self.partner_ready and steps >= self.opens_at)
        return steps >= self._alone_at
