"""The DHT of an in-memory network: records shared by all peers that have found each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from protocol.errors import RecordError
from protocol.records import open_record
from protocol.transport.base import PeerId, Record


class RecordStore:
    """What the peers of one island hold together. Forged and stale records are refused, as by real peers."""

    def __init__(self) -> None:
        self._slots: dict[bytes, dict[str, Record]] = {}  # key digest -> peer id -> its newest record

    def put(self, digest: bytes, subkey: str, sealed: bytes, expires: float, now: float) -> bool:
        """False when the record is invalid at `now` or does not outlive the one that it would replace."""
        try:
            record = open_record(digest, subkey, sealed, expires, now)
        except RecordError:
            return False
        slots = self._slots.setdefault(digest, {})
        for stale in [peer for peer, held in slots.items() if held.expires <= now]:
            del slots[stale]
        return _keep_latest(slots, record)

    def get(self, digest: bytes, now: float) -> list[Record]:
        """The records valid at `now`, sorted by peer id."""
        slots = self._slots.get(digest, {})
        return [slots[peer] for peer in sorted(slots) if slots[peer].expires > now]

    def absorb(self, other: RecordStore) -> None:
        for digest, slots in other._slots.items():
            for record in slots.values():
                _keep_latest(self._slots.setdefault(digest, {}), record)


class Island:
    """Peers that have found each other, and the records that they hold.

    A new peer is an island of its own until it connects to another peer. A partition splits an island, each
    part keeping a copy of the records; connecting and healing unite islands.
    """

    def __init__(self, members: Iterable[PeerId] = ()) -> None:
        self.records = RecordStore()
        self._members: list[PeerId] = []
        self._index: dict[PeerId, int] = {}
        self._add(members)

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> list[PeerId]:
        return list(self._members)

    def sample(self, rng: Random) -> PeerId:
        """One member at random, at a cost that does not grow with their number."""
        return rng.choice(self._members)

    def remove(self, peer: PeerId) -> None:
        index, last = self._index.pop(peer), self._members.pop()
        if last != peer:
            self._members[index] = last
            self._index[last] = index

    def absorb(self, other: Island) -> None:
        self._add(other._members)
        self.records.absorb(other.records)

    def split(self, side: Callable[[PeerId], int]) -> list[Island]:
        """One island for each different `side` of a member."""
        sides: dict[int, list[PeerId]] = {}
        for peer in self._members:
            sides.setdefault(side(peer), []).append(peer)
        parts = [Island(members) for members in sides.values()]
        for part in parts:
            part.records.absorb(self.records)
        return parts

    def _add(self, members: Iterable[PeerId]) -> None:
        for peer in members:
            self._index[peer] = len(self._members)
            self._members.append(peer)


def _keep_latest(slots: dict[str, Record], record: Record) -> bool:
    held = slots.get(record.subkey)
    if held is not None and held.expires >= record.expires:
        return False
    slots[record.subkey] = record
    return True
