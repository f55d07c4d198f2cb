"""Signed DHT records: only what its author signed, for this key and expiry, is ever accepted."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RecordError
from protocol.ground import Record
from protocol.records.identity import Identity
from protocol.records.records import (
    CLOCK_SLACK,
    MAX_LIFETIME,
    MAX_RECORD_BYTES,
    key_digest,
    open_record,
    seal_record,
)

ALICE = Identity.from_seed("alice")
BOB = Identity.from_seed("bob")
KEY = "noloco/run/stage/0"
NOW = 1_700_000_000.0
EXPIRES = NOW + 60.0


def sealed(value: bytes = b"value", key: str = KEY, expires: float = EXPIRES) -> bytes:
    return seal_record(ALICE, key, value, expires)


def opened(data: bytes, **changes: Any) -> Record:
    """What a reader gets who found `data` in the slot and at the time of `sealed`, or of `changes`."""
    found = {"digest": key_digest(KEY), "subkey": ALICE.peer_id, "expires": EXPIRES, "now": NOW}
    return open_record(sealed=data, **{**found, **changes})


def test_a_sealed_record_opens() -> None:
    record = open_record(key_digest(KEY), ALICE.peer_id, sealed(), EXPIRES, NOW)
    assert record == Record(ALICE.peer_id, b"value", EXPIRES)


def test_every_signed_part_is_bound() -> None:
    with pytest.raises(RecordError, match="wrong signature"):
        opened(sealed(), subkey=BOB.peer_id)
    with pytest.raises(RecordError, match="wrong signature"):
        opened(sealed(), expires=EXPIRES + 1)
    with pytest.raises(RecordError, match="another key"):
        opened(sealed(), digest=key_digest("noloco/run/stage/1"))
    version, key, _, signature = msgpack.unpackb(sealed())
    with pytest.raises(RecordError, match="wrong signature"):
        opened(msgpack.packb([version, key, b"other", signature]))


def test_a_signature_of_another_kind_does_not_pass_for_a_record() -> None:
    message = KEY.encode() + b"value"
    with pytest.raises(RecordError, match="wrong signature"):
        opened(msgpack.packb([1, KEY, b"value", ALICE.sign(message)]))


def test_lengths_separate_the_signed_parts() -> None:
    """Moving a character from the key to the value changes the signed bytes."""
    _, _, _, signature = msgpack.unpackb(sealed(key="noloco/ab", value=b"c"))
    moved = msgpack.packb([1, "noloco/a", b"bc", signature])
    with pytest.raises(RecordError, match="wrong signature"):
        opened(moved, digest=key_digest("noloco/a"))


@pytest.mark.parametrize("expires", [NOW, NOW - 1, -math.inf, math.inf, math.nan])
def test_expired_and_endless_records_are_refused(expires: float) -> None:
    with pytest.raises(RecordError, match="expired"):
        opened(sealed(expires=expires), expires=expires)


def test_the_lifetime_is_capped() -> None:
    longest = NOW + MAX_LIFETIME + CLOCK_SLACK
    assert open_record(key_digest(KEY), ALICE.peer_id, sealed(expires=longest), longest, NOW)
    with pytest.raises(RecordError, match="would live"):
        opened(sealed(expires=longest + 0.1), expires=longest + 0.1)


def test_size_is_checked_before_anything_else() -> None:
    with pytest.raises(RecordError, match="bytes"):
        opened(b"\xff" * (MAX_RECORD_BYTES + 1), expires=math.nan)
    with pytest.raises(RecordError, match="bytes"):
        sealed(value=bytes(MAX_RECORD_BYTES))
    assert sealed(value=bytes(MAX_RECORD_BYTES - 200))


def test_foreign_keys_are_refused() -> None:
    with pytest.raises(RecordError, match="does not begin"):
        sealed(key="petals/stage/0")
    forged = msgpack.packb([1, "petals/0", b"", bytes(64)])
    with pytest.raises(RecordError, match="does not begin"):
        opened(forged, digest=key_digest("petals/0"))


@pytest.mark.parametrize(
    "envelope",
    [None, 5, [], {"a": 1}, [1, KEY, b"v"], [1, KEY.encode(), b"v", b"s"], [1, KEY, "v", b"s"], [[[[]]]]],
)
def test_other_envelopes_are_refused(envelope: object) -> None:
    with pytest.raises(RecordError, match="not an envelope"):
        opened(msgpack.packb(envelope))


@pytest.mark.parametrize("version", [0, 2, True, None, "1", 1.0])
def test_other_versions_are_refused(version: object) -> None:
    with pytest.raises(RecordError, match="unknown version"):
        opened(msgpack.packb([version, KEY, b"v", bytes(64)]))


@pytest.mark.parametrize(
    "subkey", ["", "x", "1" * 52, ALICE.peer_id + "1", "12D3Koo\x00", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf"]
)
def test_only_ed25519_peer_ids_have_slots(subkey: str) -> None:
    with pytest.raises(RecordError, match="peer id"):
        opened(sealed(), subkey=subkey)


@given(st.binary(max_size=300))
def test_random_bytes_only_ever_raise_record_errors(data: bytes) -> None:
    with pytest.raises(RecordError):
        open_record(key_digest(KEY), ALICE.peer_id, data, EXPIRES, NOW)


@given(st.integers(0, 10_000), st.integers(1, 255), st.binary(max_size=200))
def test_a_flipped_bit_is_noticed(position: int, mask: int, value: bytes) -> None:
    damaged = bytearray(sealed(value))
    damaged[position % len(damaged)] ^= mask
    with pytest.raises(RecordError):
        open_record(key_digest(KEY), ALICE.peer_id, bytes(damaged), EXPIRES, NOW)


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(), st.lists, max_leaves=20
    )
)
def test_random_envelopes_only_ever_raise_record_errors(envelope: object) -> None:
    try:
        data = msgpack.packb(envelope)
    except ValueError:
        return  # text that msgpack cannot encode
    with pytest.raises(RecordError):
        open_record(key_digest(KEY), ALICE.peer_id, data, EXPIRES, NOW)


@given(st.text(max_size=60), st.floats())
def test_random_slots_and_expiries_only_ever_raise_record_errors(subkey: str, expires: float) -> None:
    with pytest.raises(RecordError):
        open_record(key_digest(KEY), subkey, sealed(), expires, NOW)
