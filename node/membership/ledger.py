"""Keeps what this node knows of others from its own experience: offences, and work of theirs that was checked. Pure.

Identities cost nothing, so trust does: it grows with work that was compared with others' (`checked`), and nobody's
word counts for anybody else. `fair_shares` is what everybody gets at most a small multiple of, wherever peers are
chosen: peers of one network that have not proved anything yet share what one of them would get.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from protocol.ground import PeerId
from protocol.peer_limits import PeerTable
from protocol.windows import window

OFFENCES = 3  # within the last MEETINGS with one peer; one alone may be an honest replica's bad round
MEETINGS = 5
QUARANTINE_SECONDS = 600.0  # doubling with each further one
MAX_QUARANTINE_SECONDS = 86_400.0
MAX_PEERS = 4_096  # offenders that are remembered, and as many that proved something
PROOFS = 8  # pieces of work of a peer that agreed with others', after which its measured speed is believed
CHECKS = 8  # the last of a peer that count
# of them, and the peer is left alone: where it alone makes its answers, and where others have a part in them
OFTEN_WRONG = 3
ALWAYS_WRONG = 6
# times the median network's peers, that count of one: identities cost nothing
MOST_OF_NETWORK = 2
ACQUAINTED_SECONDS = 3_600.0  # since the first of them: then it counts for itself and not for its network


@dataclass
class _Offences:
    """Outcomes of one peer's recent meetings, True for an offence, and its quarantines so far."""

    meetings: deque[bool] = field(default_factory=lambda: deque(maxlen=MEETINGS))
    until: float = float("-inf")
    times: int = 0


@dataclass
class _Proofs:
    """Results of one peer's recently checked work: True for a wrong piece.

    `count` pieces have agreed since the last wrong one, the first of them at `since`, in elapsed seconds.
    """

    since: float
    count: int = 0
    wrong: deque[bool] = field(default_factory=lambda: deque(maxlen=CHECKS))


class Ledger:
    """Remembers who offended and whose work was checked, and leaves offenders alone for a while.

    Times are elapsed seconds, so that a clock which is set right frees nobody and locks nobody away.
    """

    def __init__(self) -> None:
        self._offences = PeerTable[_Offences](MAX_PEERS)
        self._proofs = PeerTable[_Proofs](MAX_PEERS)

    @window
    def __repr__(self) -> str:
        return f"Offenders: {len(self._offences)} remembered | Checked: {len(self._proofs)}"

    def note(self, peer: PeerId, is_offence: bool, now: float) -> bool:
        """Note a meeting with `peer` at `now` in seconds; returns whether a quarantine begins with it."""
        record = self._offences.pop(peer, None)
        if record is None:
            if not is_offence:
                return False  # nothing is kept for the honest
            record = _Offences()
        self._offences[peer] = record
        record.meetings.append(is_offence)
        if sum(record.meetings) < OFFENCES:
            return False
        self._leave_alone(peer, record, now)
        return True

    def checked(self, peer: PeerId, agrees: bool, now: float, most_wrong: int) -> bool:
        """Note that a piece of work of `peer` was compared with others'; returns whether a quarantine begins with it.

        With `most_wrong` of the last `CHECKS` wrong it does.
        """
        proofs = self._proofs.get(peer) or _Proofs(now)
        self._proofs[peer] = proofs
        proofs.wrong.append(not agrees)
        if agrees:
            proofs.since = proofs.since if proofs.count else now
            proofs.count += 1
            return False
        proofs.count = 0
        if sum(proofs.wrong) < most_wrong:
            return False
        record = self._offences[peer] = self._offences.get(peer) or _Offences()
        self._leave_alone(peer, record, now)
        return True

    def _leave_alone(self, peer: PeerId, record: _Offences, now: float) -> None:
        record.until = now + min(MAX_QUARANTINE_SECONDS, QUARANTINE_SECONDS * 2.0**record.times)
        record.times += 1
        record.meetings.clear()  # it starts again afterwards
        self._proofs.pop(peer, None)

    def holds(self, peer: PeerId, now: float) -> bool:
        """Return whether `peer` is in quarantine: nothing is sent or proposed to it, no proposal taken from it."""
        record = self._offences.get(peer)
        return record is not None and now < record.until

    @property
    def knows_proofs(self) -> bool:
        """True if any peer has proved anything."""
        return bool(self._proofs)

    def is_proven(self, peer: PeerId) -> bool:
        record = self._proofs.get(peer)
        return record is not None and record.count >= PROOFS

    def is_doubted(self, peer: PeerId) -> bool:
        """Return whether one of the peer's last pieces of work was wrong."""
        record = self._proofs.get(peer)
        return record is not None and any(record.wrong)

    def is_familiar(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer has proved its work for long enough to count for itself."""
        return self.is_proven(peer) and now - self._proofs[peer].since >= ACQUAINTED_SECONDS


@dataclass(frozen=True)
class Shares:
    """Equal shares of the peers: the same for each group, and within a group the same for each peer."""

    group_of: dict[PeerId, Hashable]
    sizes: Mapping[Hashable, int]  # peers of each group
    of_group: float  # 1 / number of groups
    of_peer: dict[PeerId, float]

    @cached_property
    def least(self) -> float:
        """The least share of a peer."""
        return min(self.of_peer.values(), default=1.0)


def fair_shares(peers: Sequence[PeerId], group_of: Callable[[PeerId], Hashable]) -> Shares:
    """Share out among groups: networks and, by themselves, familiar peers. Peers of one group alone share all."""
    groups = {peer: group_of(peer) for peer in peers}
    sizes = Counter(groups.values())
    of_group = 1 / len(sizes) if sizes else 1.0
    return Shares(groups, sizes, of_group, {peer: of_group / sizes[group] for peer, group in groups.items()})


def thinned(
    peers: Sequence[PeerId], group_of: Callable[[PeerId], Hashable], rng: random.Random
) -> list[PeerId]:
    """Keep of each group at most `MOST_OF_NETWORK` times the median group's size, drawn at random, in order."""
    if len(set(map(group_of, peers))) == len(peers):
        return list(peers)
    groups: dict[Hashable, list[PeerId]] = {}
    for peer in peers:
        groups.setdefault(group_of(peer), []).append(peer)
    most = int(MOST_OF_NETWORK * median(map(len, groups.values()))) if len(groups) > 1 else len(peers)
    kept = {p for group in groups.values() for p in (rng.sample(group, most) if len(group) > most else group)}
    return [peer for peer in peers if peer in kept]
