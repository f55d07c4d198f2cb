"""Records of the DHT that a peer keeps for all, within bounds that strangers cannot move."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from protocol.records import is_in_reach
from protocol.transport.hivemind_api import DHTID, DHTLocalStorage, DictionaryDHTValue, ValueWithExpiration
from protocol.windows import amount, window

MAX_KEY_BYTES = 3 << 20  # a key's records travel in one message, and hivemind's end at 4 MiB
MAX_STORE_BYTES = 256 << 20  # strangers decide what is stored here; their records must not take all memory
SLOT_BYTES = 72  # of a record beside its value: a peer id, a time, their headings
MOST_PEERS = 1 << 14
MOST_RECORDS = 16  # of one peer; it has one at its stage, at its old one, a claim and a lease


class RecordStorage(DHTLocalStorage):  # type: ignore[misc] # hivemind has no types
    """hivemind's storage, bounded, and without two ways in which a record disappears before its time.

    In hivemind, a replayed older record is refused but shortens the life of the newer one; and a key's
    dictionary is dropped early once a search has merged a longer-lived record into it. A record that reaches too
    far, stored while this machine's clock was ahead, gives way: other peers refuse every answer that has it in it.

    A key that is full takes one more peer in place of others: those stay that came first and take half of its room,
    and among the rest it is drawn by lot, large records sooner. So a flood of fresh identities drives out itself.
    """

    def __init__(self, now: Callable[[], float] = time.time, seed: int | None = None) -> None:
        super().__init__()
        self._now = now
        self._rng = random.Random(seed)
        # at most so much, since what has expired goes without a word; counted again when a limit is reached
        self._bytes_at_most = 0
        self._bytes_of_key: dict[DHTID, int] = {}
        self._keys_of: dict[str, set[DHTID]] = {}  # under which a peer has records
        self._count_at = MOST_PEERS  # remembered: then those that have gone are forgotten

    @window
    def __repr__(self) -> str:
        return f"Keys: {len(self.data)} | Peers: {self.peers} | Size: {amount(self._bytes_at_most)} at most"

    @property
    def peers(self) -> int:
        """The number of peers remembered that have, or had, records here."""
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

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        slots = DictionaryDHTValue() if held is None else held.value
        if not isinstance(slots, DictionaryDHTValue) or self._has_many(subkey, key):
            return False
        current = slots.get(subkey)
        if current is not None and not self._gives_way(current.expiration_time, expiration_time):
            return self.holds(key, subkey, value)
        if current is not None and not is_in_reach(current.expiration_time, self._now()):
            del slots[subkey]
            current = None
        growth = SLOT_BYTES + len(value) - (SLOT_BYTES + len(current.value) if current is not None else 0)
        if self._full(growth) or not self._make_room(key, slots, subkey, growth):
            return False
        if not slots.store(subkey, value, expiration_time):
            return False
        self._keys_of.setdefault(subkey, set()).add(key)
        if held is None or expiration_time > held.expiration_time:
            self.store(key, slots, expiration_time)
        return True

    def _has_many(self, subkey: str, key: DHTID) -> bool:
        """Records of this peer under other keys."""
        keys = self._keys_of.get(subkey, set())
        if len(keys - {key}) < MOST_RECORDS:
            return False
        self._keys_of[subkey] = {
            k for k in keys if (held := self.get(k)) is not None and subkey in held.value
        }
        return len(self._keys_of[subkey] - {key}) >= MOST_RECORDS

    def _full(self, more: int) -> bool:
        self._bytes_at_most += more
        if self._bytes_at_most > MAX_STORE_BYTES or len(self._keys_of) > self._count_at:
            self._count_again(more)
        return self._bytes_at_most > MAX_STORE_BYTES

    def _count_again(self, more: int) -> None:
        self._bytes_of_key = {key: _size(item.value) for key, item in self.items()}
        self._bytes_at_most = sum(self._bytes_of_key.values()) + more
        there = {key: set(item.value.data) for key, item in self.items()}
        self._count_at = max(MOST_PEERS, 2 * sum(map(len, there.values())))
        self._keys_of = {
            peer: kept
            for peer, keys in self._keys_of.items()
            if (kept := {k for k in keys if peer in there.get(k, ())})
        }

    def _make_room(self, key: DHTID, slots: DictionaryDHTValue, subkey: str, more: int) -> bool:
        """Make room for a peer's record, which is not counted among those that go; return whether there is enough."""
        size = self._bytes_of_key.get(key, 0) + more
        if size > MAX_KEY_BYTES:
            size = _size(slots) + more
        if size > MAX_KEY_BYTES:
            young = {peer: nbytes for peer, nbytes in _after_half(slots) if peer != subkey}
            while young and size > MAX_KEY_BYTES:
                (out,) = self._rng.choices(list(young), list(young.values()))
                size -= young.pop(out)
                del slots[out]
        self._bytes_of_key[key] = size
        return size <= MAX_KEY_BYTES


def _after_half(slots: DictionaryDHTValue) -> Iterator[tuple[str, int]]:
    """Peers and the sizes of their records, without those that came first and take half of a key's room."""
    oldest = 0
    for peer, entry in slots.items():  # in the order in which they came; renewing keeps the place
        nbytes = SLOT_BYTES + len(entry.value)
        oldest += nbytes
        if oldest > MAX_KEY_BYTES / 2:
            yield peer, nbytes


def _size(slots: DictionaryDHTValue) -> int:
    return sum(SLOT_BYTES + len(entry.value) for _, entry in slots.items())
