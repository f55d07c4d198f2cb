"""Who serves what, as far as this node knows, and whom it leaves alone: from DHT records and own experience. Pure.

Records end by the wall clock, `now`, since their signers say when. Suspicion and quarantine are counted in elapsed
seconds, so that a clock which is set right frees nobody and locks nobody away. Each replica believes its own record
of others alone: an accusation that travels is an attack by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from protocol.announcement import Announcement
from protocol.peer_limits import PeerTable
from protocol.transport.base import PeerId

SUSPECT_SECONDS = 2.0  # a peer that just failed is left alone this long, doubling with each further failure
MAX_SUSPECT_SECONDS = 60.0
OFFENCES = 3  # within the last MEETINGS with one peer; one alone may be an honest replica's bad round
MEETINGS = 5
QUARANTINE_SECONDS = 600.0  # doubling with each further one
MAX_QUARANTINE_SECONDS = 86_400.0
MAX_PEERS = 4_096  # offenders that are remembered


@dataclass(frozen=True)
class Member:
    peer: PeerId
    announcement: Announcement
    expires: float  # wall clock, as its record says: of two records the one that expires last counts
    kept: float = 0.0  # seconds more, for a wall clock that jumped ahead since the record was read


@dataclass
class _Suspicion:
    since: float  # elapsed seconds, and so is `until`
    until: float
    failures: int


class View:
    """Mutable state: the last announcement of each peer, and which peers failed recently."""

    def __init__(self, elapsed: Callable[[], float] | None = None) -> None:
        """`elapsed` is a clock in seconds that nobody sets; the running loop's when none is given."""
        self.elapsed = elapsed or (lambda: asyncio.get_running_loop().time())
        self._members: dict[PeerId, Member] = {}
        self._suspicions: dict[PeerId, _Suspicion] = {}

    def update(self, peer: PeerId, announcement: Announcement, expires: float) -> None:
        known = self._members.get(peer)
        if known is None or expires > known.expires:
            self._members[peer] = Member(peer, announcement, expires)

    def expire(self, now: float) -> list[PeerId]:
        """Drop peers whose records ran out; returns them."""
        gone = [peer for peer, member in self._members.items() if not _is_current(member, now)]
        for peer in gone:
            del self._members[peer]
        for peer in [peer for peer in self._suspicions if peer not in self._members]:
            del self._suspicions[peer]
        return gone

    def clock_jumped(self, seconds: float) -> None:
        """The wall clock jumped ahead by so much: each record keeps the time it had left, until it is read again."""
        for peer, member in self._members.items():
            self._members[peer] = replace(member, kept=member.kept + seconds)

    def knows(self, peer: PeerId) -> bool:
        return peer in self._members

    def has_finished(self, peer: PeerId) -> bool:
        """Whether the peer does not train any more and only serves its stage's model."""
        return peer in self._members and self._members[peer].announcement.state == "finished"

    def suspect(self, peer: PeerId, *, asked: float | None = None) -> None:
        """The peer did not answer or answered nonsense: leave it alone for a while.

        `asked` is when, by `elapsed`. What was asked before the peer fell under suspicion failed with what made it
        suspect: of many requests at once that get no answer, only the first one counts.
        """
        known, now = self._suspicions.get(peer), self.elapsed()
        if known is not None and asked is not None and asked <= known.since:
            return
        failures = known.failures + 1 if known is not None else 1
        pause = min(MAX_SUSPECT_SECONDS, SUSPECT_SECONDS * 2 ** (failures - 1))
        self._suspicions[peer] = _Suspicion(now, now + pause, failures)

    def trust(self, peer: PeerId) -> None:
        """The peer did what it was asked to."""
        self._suspicions.pop(peer, None)

    def members(self, stage: int, now: float) -> list[Member]:
        """All unexpired replicas of a stage that have not left, by peer id."""
        return sorted(
            (
                member
                for member in self._members.values()
                if member.announcement.stage == stage
                and member.announcement.state != "leaving"
                and _is_current(member, now)
            ),
            key=lambda member: member.peer,
        )

    def serving(self, stage: int, now: float) -> list[PeerId]:
        """Replicas that take part in training and are not under suspicion."""
        return [
            member.peer
            for member in self.members(stage, now)
            if member.announcement.state == "serving" and not self._is_suspect(member.peer)
        ]

    def holding(self, stage: int, now: float) -> list[PeerId]:
        """Replicas that can give their stage's state: serving or finished."""
        return [
            member.peer
            for member in self.members(stage, now)
            if member.announcement.state in ("serving", "finished") and not self._is_suspect(member.peer)
        ]

    def _is_suspect(self, peer: PeerId) -> bool:
        suspicion = self._suspicions.get(peer)
        return suspicion is not None and suspicion.until > self.elapsed()


def _is_current(member: Member, now: float) -> bool:
    return member.expires + member.kept > now


@dataclass
class _Record:
    """Mutable state: whether each of the last meetings was an offence, and the quarantines so far."""

    meetings: deque[bool] = field(default_factory=lambda: deque(maxlen=MEETINGS))
    until: float = float("-inf")
    times: int = 0


class Quarantine:
    """Which peers broke the rules of averaging too often to be averaged with for a while.

    Mutable state: a record of each peer that ever offended.
    """

    def __init__(self) -> None:
        self._records = PeerTable[_Record](MAX_PEERS)

    def note(self, peer: PeerId, is_offence: bool, now: float) -> bool:
        """A meeting with `peer` at `now` in seconds; whether a quarantine begins with it."""
        record = self._records.pop(peer, None)
        if record is None:
            if not is_offence:
                return False  # nothing is kept for the honest
            record = _Record()
        self._records[peer] = record
        record.meetings.append(is_offence)
        if sum(record.meetings) < OFFENCES:
            return False
        record.until = now + min(MAX_QUARANTINE_SECONDS, QUARANTINE_SECONDS * 2.0**record.times)
        record.times += 1
        record.meetings.clear()  # it starts again afterwards
        return True

    def holds(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` is to be left alone: no proposal to it, none taken from it."""
        record = self._records.get(peer)
        return record is not None and now < record.until
