"""Whether this replica belongs to its stage, or missed rounds that its own speed allowed. Pure.

Being slow is not being stale: a machine ten times slower than the others ends a tenth of their rounds, and its work
counts. A replica is behind in two cases only. It began alone, from the seed or from what it had saved, because it
saw nobody, and finds that the others have been at it for long. Or it stood still, frozen or cut off, for rounds on
end while the others went on. It then downloads the stage's state, once, and belongs from there on.

Nobody's word alone makes it: most of the others must say so, each in its own signed record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.membership.view import Member
from protocol.transport.base import PeerId

FAR_AHEAD = 5  # rounds; two replicas that are nearer to each other than that may as well average
RATE_ERROR = 2.0  # announced speeds are those of a few inner steps, some of them long ago
RETRY_SECONDS = 30.0  # after a download that failed
SHORTEST_ROUND = 1e-3  # seconds
LEAST_AWAY = 60.0  # seconds; a shorter stop is an exchange or a resend that took its deadline


@dataclass(frozen=True)
class Other:
    """Another replica of the stage as its record shows it. Not positive: its speed is not known yet."""

    peer: PeerId
    round: int
    tokens_per_second: float


def others_among(members: Sequence[Member], me: PeerId) -> list[Other]:
    """Those that train."""
    return [
        Other(member.peer, member.announcement.round, member.announcement.tokens_per_second)
        for member in members
        if member.peer != me and member.announcement.state == "serving"
    ]


@dataclass(frozen=True)
class _Absence:
    seconds: float
    rounds: float  # of this replica's, that it had time for
    tokens_per_second: float  # of this replica, before
    rounds_before: Mapping[PeerId, int]  # the others'
    back_at: int  # this replica's round
    told_until: float  # by then the others' new records have been read


class Standing:
    """Mutable state: whether it began alone, its last inner step, speeds and rounds then, the last absence.

    Times are the loop's, in seconds. `lifetime` is that of records: after it a view is fresh.
    """

    def __init__(self, lifetime: float) -> None:
        self._lifetime = lifetime
        self._is_alone = False
        self._last_step: float | None = None
        self._rate_then = 0.0
        self._rounds_then: Mapping[PeerId, int] = {}
        self._absence: _Absence | None = None
        self._asks_again_at = 0.0

    def began_alone(self) -> None:
        """Its first state is the seed's or a saved one, and it saw nobody who could have given another."""
        self._is_alone = True

    def met(self) -> None:
        """It has averaged with a partner, and so takes part in what the stage knows."""
        self._is_alone = False

    def downloaded(self) -> None:
        """Its state is the others': what it missed before is made up for."""
        self._is_alone = False
        self._absence = None

    def download_failed(self, now: float) -> None:
        """Training goes on with what there is, for a while."""
        self._asks_again_at = now + RETRY_SECONDS

    @property
    def is_unsettled(self) -> bool:
        """Whether it began alone and has met nobody since."""
        return self._is_alone

    def step_done(
        self, now: float, round_: int, tokens_per_second: float, round_seconds: float, others: Sequence[Other]
    ) -> None:
        """An inner step ended; its rounds usually take `round_seconds`. A long stop before it is an absence.

        A stop no longer than the records live says nothing: the others' rounds before it are not known so well.
        """
        away = now - self._last_step if self._last_step is not None else 0.0
        if away >= max(LEAST_AWAY, self._lifetime, FAR_AHEAD * round_seconds):
            had_time_for, until = away / max(round_seconds, SHORTEST_ROUND), now + self._lifetime
            self._absence = _Absence(away, had_time_for, self._rate_then, self._rounds_then, round_, until)
        elif self._absence is not None and now > self._absence.told_until:
            self._absence = None
        self._last_step, self._rate_then = now, tokens_per_second
        self._rounds_then = {other.peer: other.round for other in others}

    def why_behind(self, now: float, round_: int, tokens_per_second: float, others: Sequence[Other]) -> str:
        """A clause for the volunteer, empty when the replica is not behind. The numbers are its own."""
        if now < self._asks_again_at:
            return ""
        if self._is_alone and tokens_per_second > 0:
            ahead = [_missed(other, round_, tokens_per_second) >= FAR_AHEAD for other in others]
            if _most(ahead):
                return "it began alone, and the others have been training for long"
        if self._absence is not None:
            known = [other for other in others if other.peer in self._absence.rounds_before]
            if _most([_went_on(other, round_, self._absence) for other in known]):
                return f"it stood still for {self._absence.seconds:.0f} s while the others went on"
        return ""


def _missed(other: Other, round_: int, tokens_per_second: float) -> float:
    """Rounds that the other has ended beyond those that its speed gave it while this replica ended its own."""
    if other.tokens_per_second <= 0:
        return 0.0
    return other.round - RATE_ERROR * _faster(other, tokens_per_second) * (round_ + 1)


def _went_on(other: Other, round_: int, absence: _Absence) -> bool:
    """Whether the other ended most rounds that it had time for in the absence, beside those since then.

    In a stop of the whole stage it ended none; what its last record did not show yet is no more than half of that.
    """
    faster = _faster(other, absence.tokens_per_second)
    since = RATE_ERROR * faster * (round_ - absence.back_at + 1)
    gained = other.round - absence.rounds_before[other.peer] - since
    return gained > max(FAR_AHEAD, faster * absence.rounds / 2)


def _faster(other: Other, tokens_per_second: float) -> float:
    return max(1.0, other.tokens_per_second / tokens_per_second) if tokens_per_second > 0 else 1.0


def _most(votes: Sequence[bool]) -> bool:
    return 2 * sum(votes) > len(votes)
