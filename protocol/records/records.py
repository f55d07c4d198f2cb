"""Signed DHT records: what a peer may store, and how everyone else checks it.

A record lives under a key, in the slot (sub-key) of the peer that signed it. A peer id contains the public
key, so a record proves its author to anyone: no peer can write into another's slot, alter its value or its
expiry, or move it to another key. What a signature cannot prevent is the replay of an older record that has
not expired yet; stores keep the one that expires last, so that a replay never replaces a newer record.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Protocol

import msgpack

from protocol.errors import RecordError
from protocol.ground import PeerId, Record
from protocol.records.identity import public_key_of, verify

MAX_RECORD_BYTES = 16 * 1024  # a replica's record takes about 1 KiB; the DHT is no place for bulk
MAX_LIFETIME = 3600.0  # seconds; without a cap, one record could occupy its slot for years
CLOCK_SLACK = 5.0  # seconds; peers whose clocks differ by more than 3 s do not get to work together at all
LEAST_GAIN = 1e-3  # seconds by which a record outlives the one that it replaces
KEY_PREFIX = "noloco/"

_VERSION = 1
_DOMAIN = b"noloco dht record v1\0"  # so that a signature made for a record means nothing anywhere else


class Signer(Protocol):
    """A peer's key, or whatever signs with it."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, data: bytes) -> bytes: ...


def key_digest(key: str) -> bytes:
    """The 20 bytes under which the DHT stores `key`: hivemind's `DHTID.generate(source=key.encode())`."""
    return hashlib.sha1(key.encode()).digest()


def seal_record(identity: Signer, key: str, value: bytes, expires: float, credential: bytes = b"") -> bytes:
    """Sign `value` for the slot of `identity` under `key` until `expires` (seconds since the epoch).

    The `credential` names its peer itself (`protocol.access.admission`) and needs no signature.

    Raises `RecordError` when the record would be too large or `key` does not begin with "noloco/".
    """
    signature = identity.sign(_signed_bytes(key, identity.peer_id, expires, value))
    sealed: bytes = msgpack.packb([_VERSION, key, value, signature, *([credential] if credential else [])])
    _check_size(sealed)
    _check_key(key)
    return sealed


def open_record(digest: bytes, subkey: str, sealed: bytes, expires: float, now: float) -> Record:
    """Check a record found under `digest` in the slot `subkey`, and return its content.

    Raises `RecordError`, and nothing else, for any bytes that are not a record which the peer `subkey` signed
    for this key and expiry, and which is valid at `now`.
    """
    _check_size(sealed)
    check_lifetime(expires, now)
    return authenticate(digest, subkey, sealed, expires)


def expiry(now: float, lifetime: float, last: float) -> float:
    """The time at which a record put at `now` ends, given when the signer's last one under its key did.

    Stores keep the record that expires last, so each has to outlive the one before; unless that one reaches so far
    that no peer holds it: it is of a clock that was ahead and has been set right.
    """
    wanted = now + lifetime
    return max(wanted, last + LEAST_GAIN) if is_in_reach(last + LEAST_GAIN, now) else wanted


def is_in_reach(expires: float, now: float) -> bool:
    """Return whether a record's end is not further in the future than records may live."""
    return expires <= now + MAX_LIFETIME + CLOCK_SLACK


def check_lifetime(expires: float, now: float) -> None:
    """Check that a record is not over at `now` and does not reach too far into the future. Raises `RecordError`."""
    if not math.isfinite(expires) or expires <= now:
        raise RecordError("the record has expired")
    if not is_in_reach(expires, now):
        raise RecordError(f"the record would live {expires - now:.0f} s; {MAX_LIFETIME:.0f} s are allowed")


def authenticate(digest: bytes, subkey: str, sealed: bytes, expires: float) -> Record:
    """The part of `open_record` that does not depend on the time, so that its result may be remembered."""
    _check_size(sealed)
    key, value, signature, credential = _unpack(sealed)
    _check_key(key)
    if key_digest(key) != digest:
        raise RecordError(f"the record belongs to another key, {key[:80]!r}")
    public_key = public_key_of(subkey)
    if not verify(public_key, _signed_bytes(key, subkey, expires, value), signature):
        raise RecordError(f"the record of {subkey} has a wrong signature")
    return Record(PeerId(subkey), value, expires, credential, bytes(sealed))


def _unpack(sealed: bytes) -> tuple[str, bytes, bytes, bytes]:
    try:
        envelope = msgpack.unpackb(sealed)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("the record is not an envelope") from error
    match envelope:
        case [version, str(key), bytes(value), bytes(signature), *rest] if _is_credential(rest):
            if type(version) is not int or version != _VERSION:
                raise RecordError(f"the record has the unknown version {str(version)[:20]!r}")
            return key, value, signature, rest[0] if rest else b""
    raise RecordError("the record is not an envelope")


def _is_credential(rest: list[object]) -> bool:
    return not rest or (len(rest) == 1 and isinstance(rest[0], bytes))


def _signed_bytes(key: str, subkey: str, expires: float, value: bytes) -> bytes:
    """The signed bytes. Each variable part is preceded by its length: no two records sign the same bytes."""
    key_bytes, subkey_bytes = key.encode(), subkey.encode()
    lengths = struct.pack(">IId", len(key_bytes), len(subkey_bytes), expires)
    return b"".join((_DOMAIN, lengths, key_bytes, subkey_bytes, value))


def _check_size(sealed: bytes) -> None:
    if len(sealed) > MAX_RECORD_BYTES:
        raise RecordError(f"the record has {len(sealed)} bytes; {MAX_RECORD_BYTES} are allowed")


def _check_key(key: str) -> None:
    if not key.startswith(KEY_PREFIX):
        raise RecordError(f"the key {key[:80]!r} does not begin with {KEY_PREFIX!r}")
