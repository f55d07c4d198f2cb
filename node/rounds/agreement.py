"""Two replicas agreed to end a round together: when to end it, what to tell the other, when to ask again. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from node.rounds.meeting import SHORTEST_STEP, Bounds, Meeting, RoundProgress
from protocol.transport.base import PeerId

RENEW_AFTER = 0.25  # of a round: a partner not heard of for so long is asked whether it holds to the pair


@dataclass(frozen=True)
class Pair:
    partner: PeerId
    name: str  # of this exchange, known to both


@dataclass
class Agreement:
    """A pair that both know of. Mutable: `partner_ready`."""

    pair: Pair
    meets_at: float  # on the clock of `RoundProgress`
    paces: bool  # the end of an inner step of this replica, not of the partner, ends the round
    partner_step: float  # seconds
    heard_at: float
    partner_ready: bool = False  # it has ended the round, or has to end it before long

    @classmethod
    def of(
        cls, pair: Pair, me: PeerId, meets_at: float, mine: Meeting, theirs: Meeting, now: float
    ) -> Agreement:
        """From what both have told. The partner comes to the same, with `paces` the other way round."""
        paces = (mine.step_seconds, me) > (theirs.step_seconds, pair.partner)
        return cls(pair, meets_at, paces, theirs.step_seconds, heard_at=now)

    def must_end(self, here: RoundProgress, bounds: Bounds) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        if here.steps >= bounds.ends_at:
            return True
        is_nearest = self.paces and here.now + here.step_seconds / 2 >= self.meets_at
        return here.steps >= bounds.opens_at and (self.partner_ready or is_nearest)

    def is_ready(self, here: RoundProgress, bounds: Bounds) -> bool:
        """Whether to tell the partner to end the round: it ends here, or cannot go on for another step of theirs."""
        partners_step = math.ceil(self.partner_step / max(here.step_seconds, SHORTEST_STEP))
        is_late = here.steps >= max(bounds.opens_at, bounds.ends_at - partners_step)
        return self.must_end(here, bounds) or (is_late and not self.paces)

    def must_renew(self, here: RoundProgress, nominal: int, in_doubt: bool) -> bool:
        """Whether to ask the partner again: in the middle of the round, or at once when it is in doubt."""
        silent_steps = (here.now - self.heard_at) / max(here.step_seconds, SHORTEST_STEP)
        if in_doubt:
            return here.steps < nominal and silent_steps > 1
        return nominal // 2 <= here.steps < nominal and silent_steps > RENEW_AFTER * nominal
