"""Keeps what this node knows of other peers from its own experience, and gives each a fair share. Pure.

Identities cost nothing, so trust does: it grows with work that was compared with that of others, and nobody's word
counts for anybody else. `fair_shares` is what everybody gets at most a small multiple of, wherever peers are
chosen: peers of one network that have not proved anything yet share what one of them would get.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from protocol.access.peer_limits import PeerTable, doubled
from protocol.ground import PeerId
from protocol.windows import window

OFFENCES = 3  # within the last MEETINGS with one peer; one alone may be an honest replica's bad round
MEETINGS = 5
QUARANTINE_SECONDS = 600.0  # doubling with each further one
MAX_QUARANTINE_SECONDS = 86_400.0
MAX_PEERS = 4_096  # that are remembered
PROOFS = 8  # pieces of work of a peer that agreed with others', after which its measured speed is believed
CHECKS = 8  # the last of a peer that count
# of them, and the peer is left alone: where it alone makes its answers, and where others have a part in them
OFTEN_WRONG = 3
ALWAYS_WRONG = 6
# times the median network's peers, that count of one: identities cost nothing
MOST_OF_NETWORK = 2
HOLDS = "held"  # the event of a peer that holds a microbatch for long
ACQUAINTED_SECONDS = 3_600.0  # since the first of them: then it counts for itself and not for its network


@dataclass
class _Record:
    """What one peer has done. Times are elapsed seconds."""

    meetings: deque[bool] = field(default_factory=lambda: deque(maxlen=MEETINGS))  # True for an offence
    overruled: float = 0.0  # when a refusal was last found wrong
    quarantine_ends: float = float("-inf")
    quarantines: int = 0
    checks: deque[bool] = field(default_factory=lambda: deque(maxlen=CHECKS))  # True for wrong work
    proofs: int = 0  # checks without a wrong one since
    first_proof: float = 0.0
    logged: set[str] = field(default_factory=set)  # events


class Ledger:
    """Remembers what each peer has done, and leaves offenders alone for a while.

    | What a peer did | What follows |
    |---|---|
    | gave worthless or odd work, broke the protocol, kept a microbatch | an offence |
    | refused the content of a microbatch that others took | an offence for all that was under way together |
    | committed `OFFENCES` in `MEETINGS` | a quarantine, twice as long as the one before |
    | was right in checks of its work | after `PROOFS` its speed is believed, later it is familiar |
    | was wrong in checks of its work | more checks; often wrong among `CHECKS`, a quarantine |
    | failed | one line in the log, another one after a good meeting |
    | holds a microbatch for long | one line in the log |

    Times are elapsed seconds, so that a clock which is set right frees nobody and locks nobody away.
    Mutable state: the records of the last `MAX_PEERS` peers of which there was something to record.
    """

    def __init__(self) -> None:
        self._records = PeerTable[_Record](MAX_PEERS)
        self.knows_proofs = False  # whether any peer may have proved anything

    @window
    def __repr__(self) -> str:
        return f"Peers: {len(self._records)} remembered"

    def record_meeting(self, peer: PeerId, is_offence: bool, now: float) -> bool:
        """Record the outcome of a meeting; return whether a quarantine begins with it."""
        if not is_offence and peer not in self._records:
            return False  # nothing is kept of the honest
        record = self._record(peer)
        record.meetings.append(is_offence)
        if not is_offence:
            record.logged &= {HOLDS}
        if sum(record.meetings) < OFFENCES:
            return False
        self._begin_quarantine(record, now)
        return True

    def record_check(self, peer: PeerId, agrees: bool, now: float, most_wrong: int) -> bool:
        """Record that work of `peer` was compared with others'; return whether a quarantine begins with it.

        With `most_wrong` of the last `CHECKS` wrong it does.
        """
        self.knows_proofs = True
        record = self._record(peer)
        record.checks.append(not agrees)
        if agrees:
            record.first_proof = record.first_proof if record.proofs else now
            record.proofs += 1
            return False
        record.proofs = 0
        if sum(record.checks) < most_wrong:
            return False
        self._begin_quarantine(record, now)
        return True

    def record_overruling(self, peer: PeerId, asked: float, now: float) -> bool:
        """Record that others took what `peer`, asked at `asked`, refused; return whether that is another offence.

        What was asked before the last one is part of that.
        """
        record = self._record(peer)
        is_another = asked >= record.overruled
        if is_another:
            record.overruled = now
        return is_another

    def record_event(self, peer: PeerId, event: str) -> bool:
        """Record what is worth a line in the log; return whether there is none yet."""
        record = self._record(peer)
        is_new = event not in record.logged
        record.logged.add(event)
        return is_new

    def _record(self, peer: PeerId) -> _Record:
        record = self._records[peer] = self._records.get(peer) or _Record()
        return record

    def _begin_quarantine(self, record: _Record, now: float) -> None:
        seconds = doubled(QUARANTINE_SECONDS, record.quarantines, MAX_QUARANTINE_SECONDS)
        record.quarantine_ends = now + seconds
        record.quarantines += 1
        record.meetings.clear()  # it starts again afterwards
        record.checks.clear()
        record.proofs = 0

    def is_quarantined(self, peer: PeerId, now: float) -> bool:
        """Return whether nothing is sent or proposed to `peer` at `now`, and no proposal of its is taken."""
        record = self._records.get(peer)
        return record is not None and now < record.quarantine_ends

    def is_proven(self, peer: PeerId) -> bool:
        """Return whether enough of the peer's work agreed with others'."""
        record = self._records.get(peer)
        return record is not None and record.proofs >= PROOFS

    def is_doubted(self, peer: PeerId) -> bool:
        """Return whether one of the peer's last pieces of work was wrong."""
        record = self._records.get(peer)
        return record is not None and any(record.checks)

    def is_familiar(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer has proved its work for long enough to count for itself."""
        return self.is_proven(peer) and now - self._records[peer].first_proof >= ACQUAINTED_SECONDS


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
