"""A stage that will never keep up with the one before it: noticed from what replicas say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from node.membership.view import Member

TOO_SLOW = 4.0  # times as long as the stage before takes; with less, a replica more or a move mends it


@dataclass(frozen=True)
class Lag:
    """Seconds for a microbatch, all replicas of a stage together, and of this replica alone."""

    here: float
    stage: float
    before: float

    @property
    def is_too_slow(self) -> bool:
        return self.stage > TOO_SLOW * self.before


def lag(own: float | None, stage: Iterable[Member], before: Iterable[Member]) -> Lag | None:
    """`own` is this replica's capacity in microbatches per second; None while too little is known."""
    ours, theirs = (
        [member.announcement.capacity for member in members if member.announcement.state == "serving"]
        for members in (stage, before)
    )
    if not own or not ours or not theirs or not all([*ours, *theirs]):
        return None
    return Lag(
        here=1 / own,
        stage=1 / sum(capacity for capacity in ours if capacity),
        before=1 / sum(capacity for capacity in theirs if capacity),
    )
