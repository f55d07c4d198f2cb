"""What this peer accepts from, and keeps for, the DHT: only records in the format of `protocol.records`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import msgpack

from protocol.errors import RecordError
from protocol.records import CLOCK_SLACK, authenticate, check_lifetime, is_in_reach
from protocol.transport.base import Record
from protocol.transport.hivemind_api import (
    DHTID,
    DHTLocalStorage,
    DHTRecord,
    DictionaryDHTValue,
    RecordValidatorBase,
)

MAX_KEY_BYTES = 3 << 20  # a key's records travel in one message, and hivemind's end at 4 MiB
MAX_STORE_BYTES = 256 << 20  # strangers decide what is stored here; their records must not take all memory

_REMEMBERED = 2048  # records whose signature was checked; each search brings the same ones from several peers


class RecordValidator(RecordValidatorBase):  # type: ignore[misc] # hivemind has no types
    """Called by hivemind for each record that it stores for others, stores for itself, or finds."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._authenticate = lru_cache(_REMEMBERED)(authenticate)

    def validate(self, record: DHTRecord) -> bool:
        """False for anything bad, plain values without a sub-key included. Never raises."""
        try:
            subkey = msgpack.unpackb(record.subkey)
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        try:
            self.open(record.key, subkey, record.value, record.expiration_time)
        except RecordError:
            return False
        return True

    def open(self, digest: bytes, subkey: object, packed: bytes, expires: float) -> Record:
        """Check a value as the DHT holds it, a sealed record packed once more. Raises `RecordError`.

        hivemind throws away a peer's whole answer when one record in it is invalid. Since clocks differ, and
        an answer may hold a record that expired a moment ago, such a record passes here; `get` omits it.
        """
        try:
            sealed = msgpack.unpackb(packed)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RecordError("the value is not msgpack") from error
        if not isinstance(subkey, str) or not isinstance(sealed, bytes):
            raise RecordError("not a record in the slot of a peer")
        now = self._now()
        check_lifetime(expires, now if expires > now else now - CLOCK_SLACK)
        return self._authenticate(digest, subkey, sealed, expires)


class RecordStorage(DHTLocalStorage):  # type: ignore[misc] # hivemind has no types
    """hivemind's storage, bounded, and without two ways in which a record disappears before its time.

    In hivemind, a replayed older record is refused but shortens the life of the newer one; and a key's
    dictionary is dropped early once a search has merged a longer-lived record into it. A record that reaches too
    far, stored while this machine's clock was ahead, gives way: other peers refuse every answer that has it in it.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._now = now
        self._bytes_at_most = 0  # grows with every store; counted again when it reaches the limit

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        slots = DictionaryDHTValue() if held is None else held.value
        if not isinstance(slots, DictionaryDHTValue):
            return False
        current = slots.get(subkey)
        if current is not None and not is_in_reach(current.expiration_time, self._now()):
            del slots[subkey]
            current = None
        if current is not None and current.expiration_time >= expiration_time:
            return False
        growth = len(value) - (len(current.value) if current is not None else 0)
        if growth > 0 and (_size(slots) + growth > MAX_KEY_BYTES or self._full(growth)):
            return False
        if not slots.store(subkey, value, expiration_time):
            return False
        if held is None or expiration_time > held.expiration_time:
            self.store(key, slots, expiration_time)
        return True

    def _full(self, more: int) -> bool:
        self._bytes_at_most += more
        if self._bytes_at_most > MAX_STORE_BYTES:
            self._bytes_at_most = sum(_size(item.value) for _, item in self.items()) + more
        return self._bytes_at_most > MAX_STORE_BYTES


def _size(slots: DictionaryDHTValue) -> int:
    return sum(len(entry.value) for _, entry in slots.items())
