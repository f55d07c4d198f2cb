"""What a peer lets into its part of the DHT, and how long it keeps it."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity import Identity
from protocol.records import CLOCK_SLACK, MAX_LIFETIME, key_digest, seal_record
from protocol.transport import dht_storage
from protocol.transport.dht import RecordValidator
from protocol.transport.dht_guard import ANSWER_BYTES, MOST_SLOTS
from protocol.transport.dht_storage import MAX_KEY_BYTES, MOST_RECORDS, SLOT_BYTES, RecordStorage
from protocol.transport.hivemind_api import DHTID, DHTRecord, MSGPackSerializer

ALICE = Identity.from_seed("alice")
BOB = Identity.from_seed("bob")
KEY = "noloco/test/validator"
DIGEST = key_digest(KEY)
NOW = 1_700_000_000.0


def dht_record(expires: float = NOW + 60, subkey: object = ALICE.peer_id, **changes: object) -> DHTRecord:
    sealed = seal_record(ALICE, KEY, b"value", expires)
    fields = {
        "key": DIGEST,
        "subkey": MSGPackSerializer.dumps(subkey),
        "value": MSGPackSerializer.dumps(sealed),
    }
    return DHTRecord(**{**fields, "expiration_time": expires, **changes})


def valid(record: DHTRecord, now: float = NOW) -> bool:
    return RecordValidator(lambda: now).validate(record)


@pytest.mark.parametrize("key", ["", KEY, "noloco/" + "ж" * 300])
def test_our_digest_is_hivemind_s(key: str) -> None:
    assert key_digest(key) == DHTID.generate(source=key.encode()).to_bytes()


def test_a_signed_record_is_valid_and_nothing_else_is() -> None:
    assert valid(dht_record())
    assert not valid(dht_record(subkey=None))  # hivemind's mark of a value without sub-keys
    assert not valid(dht_record(subkey=BOB.peer_id))
    assert not valid(dht_record(subkey=b"bytes"))
    assert not valid(dht_record(subkey=["list"]))
    assert not valid(dht_record(key=key_digest("noloco/other")))
    assert not valid(dht_record(value=MSGPackSerializer.dumps("text")))
    assert not valid(dht_record(value=b""))
    assert not valid(dht_record(subkey=ALICE.peer_id, **{"expiration_time": NOW + 61}))


def test_records_that_expired_a_moment_ago_do_not_spoil_an_answer() -> None:
    assert valid(dht_record(NOW), NOW + CLOCK_SLACK - 0.1)
    assert not valid(dht_record(NOW), NOW + CLOCK_SLACK + 0.1)
    assert valid(dht_record(NOW + MAX_LIFETIME))
    assert not valid(dht_record(NOW + MAX_LIFETIME + CLOCK_SLACK + 1))


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60), st.floats())
def test_validating_random_bytes_never_raises(
    key: bytes, subkey: bytes, value: bytes, expires: float
) -> None:
    assert not valid(DHTRecord(key, subkey, value, expires))
    assert not valid(dht_record(value=value))
    assert not valid(DHTRecord(DIGEST, subkey, dht_record().value, NOW + 60))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """hivemind's storage reads a clock of its own; this sets it."""
    time = [NOW]
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: time[0])
    return time


def held(storage: RecordStorage) -> dict[str, bytes]:
    item = storage.get(DHTID.from_bytes(DIGEST))
    return {} if item is None else {subkey: entry.value for subkey, entry in item.value.items()}


def put(storage: RecordStorage, subkey: str, value: bytes, lifetime: float) -> bool:
    return storage.store_subkey(DHTID.from_bytes(DIGEST), subkey, value, NOW + lifetime)


def test_the_storage_keeps_the_latest_until_it_expires(clock: list[float]) -> None:
    storage = RecordStorage()
    assert put(storage, "a", b"1", 60)
    assert put(storage, "a", b"2", 80)
    assert not put(storage, "a", b"0", 60)  # a replay; hivemind's own storage would now forget "2" after 60 s
    assert not put(storage, "a", b"3", 80)
    assert put(storage, "a", b"2", 80)  # it is here; a peer that comes back may store it two ways at once
    assert put(storage, "b", b"b", 70)
    clock[0] = NOW + 75
    assert held(storage) == {"a": b"2"}
    clock[0] = NOW + 81
    assert held(storage) == {}
    assert len(storage) == 0


def test_a_merged_record_does_not_shorten_the_life_of_others(clock: list[float]) -> None:
    storage = RecordStorage()
    assert put(storage, "a", b"1", 30)
    storage.get(DHTID.from_bytes(DIGEST)).value.store("b", b"merged", NOW + 50)  # as hivemind's searches do
    assert put(storage, "a", b"2", 40)
    clock[0] = NOW + 35
    assert held(storage)["a"] == b"2"


def test_strangers_cannot_fill_the_memory(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "MAX_KEY_BYTES", 10 * (100 + SLOT_BYTES))
    monkeypatch.setattr(dht_storage, "MAX_STORE_BYTES", 25 * (100 + SLOT_BYTES))
    storage = RecordStorage()
    others = [DHTID.generate(source=b"%d" % number) for number in range(30)]
    assert sum(put(storage, f"peer {number}", bytes(100), 60) for number in range(10)) == 10
    assert put(storage, "peer 0", bytes(100), 80)
    stored = [storage.store_subkey(key, f"peer {n}", bytes(100), NOW + 60) for n, key in enumerate(others)]
    assert sum(stored) == 15
    clock[0] = NOW + 81
    stored = [storage.store_subkey(key, f"peer {n}", bytes(100), NOW + 120) for n, key in enumerate(others)]
    assert sum(stored) == 25


def test_peers_that_have_gone_are_forgotten(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "MOST_PEERS", 100)
    storage = RecordStorage()
    for number in range(2_000):
        clock[0] = NOW + number
        assert storage.store_subkey(
            DHTID.generate(source=b"%d" % number), f"peer {number}", b"x", clock[0] + 20
        )
        assert storage.peers <= 102


def test_a_full_key_fits_an_answer(clock: list[float]) -> None:
    """However small its records are; else who fills it would keep everybody from reading it."""
    storage, number = RecordStorage(), MAX_KEY_BYTES // (150 + SLOT_BYTES)
    length = len(ALICE.peer_id)
    assert all(put(storage, f"{n:0{length}}", bytes(150), 60) for n in range(number + 2))
    assert len(held(storage)) == number
    packed = MSGPackSerializer.dumps(storage.get(DHTID.from_bytes(DIGEST)).value)
    assert MAX_KEY_BYTES * 0.9 < len(packed) < ANSWER_BYTES
    assert number < MOST_SLOTS


def test_one_peer_keeps_few_records(clock: list[float]) -> None:
    storage = RecordStorage()
    keys = [DHTID.generate(source=b"%d" % number) for number in range(2 * MOST_RECORDS)]
    assert sum(storage.store_subkey(key, "one", b"x", NOW + 60) for key in keys) == MOST_RECORDS
    assert storage.store_subkey(keys[0], "one", b"y", NOW + 70)  # its old ones go on
    assert storage.store_subkey(keys[-1], "another", b"x", NOW + 70)
    clock[0] = NOW + 65
    assert storage.store_subkey(keys[-1], "one", b"x", NOW + 120)


def test_a_flood_of_fresh_peers_drives_out_itself(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed before: a full key refused whoever came, so that no newcomer was ever seen."""
    monkeypatch.setattr(dht_storage, "MAX_KEY_BYTES", 200_000)
    storage = RecordStorage(seed=1)
    honest = {f"honest {number}" for number in range(20)}
    assert all(put(storage, peer, bytes(1000), 60) for peer in honest)
    present = list[bool]()
    for number in range(2000):
        assert put(storage, f"flood {number}", bytes(16_000), 300)
        if number % 10 == 0:  # a newcomer says that it is here twice in a lifetime of records
            assert put(storage, "newcomer", bytes(1000), 60 + number / 1000)
        present.append("newcomer" in held(storage))
        assert honest <= set(held(storage))
        assert sum(len(value) for value in held(storage).values()) <= 200_000
    assert sum(present) / len(present) > 0.9


def test_plain_values_are_not_mixed_with_records(clock: list[float]) -> None:
    storage = RecordStorage()
    storage.store(DHTID.from_bytes(DIGEST), msgpack.packb("plain"), NOW + 60)
    assert not put(storage, "a", b"1", 70)
