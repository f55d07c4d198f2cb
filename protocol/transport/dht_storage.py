"""Records of the DHT that a peer keeps for all, within bounds that strangers cannot move."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable

from protocol.records.records import is_in_reach
from protocol.transport.hivemind_api import DHTID, DHTLocalStorage, DictionaryDHTValue, ValueWithExpiration
from protocol.transport.record_room import Room
from protocol.windows import counted, window

MAX_KEY_BYTES = 3 << 20  # a key's records travel in one message, and hivemind's end at 4 MiB
MAX_STORE_BYTES = 256 << 20  # strangers decide what is stored here; their records must not take all memory
SLOT_BYTES = 72  # of a record beside its value, in a message: a peer id, a time, their headings
KEPT_BYTES = 3_456  # the same in memory, under a key of its own (measured: 3,300 to 3,410)
MOST_RECORDS = 16  # of one peer; it has one at its stage, at its old one, a claim and a lease

Slot = tuple[DHTID, str]  # a key and a peer


class RecordStorage(DHTLocalStorage):  # type: ignore[misc] # hivemind has no types
    """hivemind's storage, bounded, and without two ways in which a record disappears before its time.

    In hivemind, a replayed older record is refused but shortens the life of the newer one; and a key's
    dictionary is dropped early once a search has merged a longer-lived record into it. A record that reaches too
    far, stored while this machine's clock was ahead, gives way: other peers refuse every answer that has it in it.

    The store as a whole and each key is a `Room`: where it is full a record takes the place of others, so that a
    flood of fresh identities drives out itself.

    Mutable state beside hivemind's: when each slot's record ends, the rooms, and the keys of each peer.
    """

    def __init__(self, now: Callable[[], float] = time.time, seed: int | None = None) -> None:
        super().__init__()
        self._now = now
        self._rng = random.Random(seed)
        self._ends: dict[Slot, float] = {}
        self._next_ends: list[tuple[float, Slot]] = []  # a heap of them all; what it says may be too early
        self._room = Room[Slot](MAX_STORE_BYTES, self._rng)
        self._rooms: dict[DHTID, Room[str]] = {}
        self._keys_of: dict[str, set[DHTID]] = {}

    @window
    def __repr__(self) -> str:
        return f"Keys: {len(self.data)} | Peers: {self.peers} | {counted(len(self._ends), 'record')}, {self._room!r}"

    @property
    def peers(self) -> int:
        """The number of peers that have records here."""
        return len(self._keys_of)

    def wants(self, key: DHTID, subkey: str, expires: float) -> bool:
        """Return whether a record would be new here; asked before its signature is checked."""
        current = self._current(key, subkey)
        return current is None or self._gives_way(current.expiration_time, expires)

    def holds(self, key: DHTID, subkey: str, value: bytes) -> bool:
        """Return whether this very record is here: whoever stores it again, perhaps another way, has stored it."""
        current = self._current(key, subkey)
        return current is not None and current.value == value

    def _current(self, key: DHTID, subkey: str) -> ValueWithExpiration | None:
        held = self.get(key)
        is_of_records = held is not None and isinstance(held.value, DictionaryDHTValue)
        return held.value.get(subkey) if is_of_records else None

    def _gives_way(self, present: float, expires: float) -> bool:
        return present < expires or not is_in_reach(present, self._now())

    def store_subkey(
        self, key: DHTID, subkey: str, value: bytes, expiration_time: float, network: str = ""
    ) -> bool:
        """Store a record, in place of others where that is needed; return whether it is here now.

        `network` is that of the connection which brought it, empty for this peer's own and where it is not known.
        """
        self._drop_ended()
        held = self.get(key)
        slots = DictionaryDHTValue() if held is None else held.value
        if not isinstance(slots, DictionaryDHTValue) or self._has_many(subkey, key):
            return False
        current = slots.get(subkey)
        if current is not None and not self._gives_way(current.expiration_time, expiration_time):
            return self.holds(key, subkey, value)
        if not self._make_room((key, subkey), len(value), network):
            return False
        if current is not None and not is_in_reach(current.expiration_time, self._now()):
            del slots[subkey]
        if not slots.store(subkey, value, expiration_time):
            return False
        self._account((key, subkey), len(value), expiration_time, network)
        held = self.get(key)
        if held is None or held.value is not slots or expiration_time > held.expiration_time:
            self.store(key, slots, expiration_time)
        _forget_replaced(slots)
        _forget_replaced(self)
        return True

    def _has_many(self, subkey: str, key: DHTID) -> bool:
        """Return whether the peer has as many records under other keys as one may have."""
        keys = self._keys_of.get(subkey, ())
        return len(keys) - (key in keys) >= MOST_RECORDS

    def _make_room(self, slot: Slot, nbytes: int, network: str) -> bool:
        """Drop the records that give way to one, under its key and in the store; return whether it is let in."""
        key, subkey = slot
        if SLOT_BYTES + nbytes > MAX_KEY_BYTES:
            return False
        room = self._rooms.get(key)
        under_key = [] if room is None else room.giving_way(subkey, SLOT_BYTES + nbytes, network)
        in_store = self._room.giving_way(slot, KEPT_BYTES + nbytes, network)
        if under_key is None or in_store is None:
            return False
        for gone in {*((key, out) for out in under_key), *in_store}:
            self._drop(gone)
        return True

    def _account(self, slot: Slot, nbytes: int, expires: float, network: str) -> None:
        key, subkey = slot
        if slot not in self._ends:
            heapq.heappush(self._next_ends, (expires, slot))
        self._ends[slot] = expires
        if len(self._next_ends) > 2 * len(self._ends) + 16:  # of slots that have given way, most of them
            self._next_ends = [(ends, one) for one, ends in self._ends.items()]
            heapq.heapify(self._next_ends)
        self._room.take(slot, KEPT_BYTES + nbytes, network)
        self._rooms.setdefault(key, Room(MAX_KEY_BYTES, self._rng)).take(subkey, SLOT_BYTES + nbytes, network)
        self._keys_of.setdefault(subkey, set()).add(key)

    def _drop_ended(self) -> None:
        """Drop records that are over; hivemind keeps those under a key on which nobody looks."""
        now = self._now()
        while self._next_ends and self._next_ends[0][0] < now:
            slot = heapq.heappop(self._next_ends)[1]
            ends = self._ends.get(slot)
            if ends is not None and ends >= now:
                heapq.heappush(self._next_ends, (ends, slot))  # it was renewed meanwhile
            elif ends is not None:
                self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        key, subkey = slot
        self._ends.pop(slot, None)
        self._room.give_back(slot)
        self._rooms[key].give_back(subkey)
        self._keys_of[subkey].discard(key)
        if not self._keys_of[subkey]:
            del self._keys_of[subkey]
        held = self.data.get(key)
        if held is not None and isinstance(held.value, DictionaryDHTValue):
            del held.value[subkey]
        if not self._rooms[key]:
            del self._rooms[key]
            del self[key]


def _forget_replaced(storage: DHTLocalStorage | DictionaryDHTValue) -> None:
    """Forget, once they are many, hivemind's entries for what was renewed: each would stay until its time is over."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 16:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
