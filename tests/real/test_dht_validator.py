"""What a peer lets into its part of the DHT, and how long it keeps it."""

from __future__ import annotations

import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.records.identity import Identity
from protocol.records.records import CLOCK_SLACK, MAX_LIFETIME, key_digest, seal_record
from protocol.transport import dht_storage
from protocol.transport.dht import RecordValidator
from protocol.transport.dht_guard import ANSWER_BYTES, MOST_SLOTS
from protocol.transport.dht_storage import KEPT_BYTES, MAX_KEY_BYTES, MOST_RECORDS, SLOT_BYTES, RecordStorage
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
    storage = RecordStorage(lambda: clock[0])
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
    storage = RecordStorage(lambda: clock[0])
    assert put(storage, "a", b"1", 30)
    storage.get(DHTID.from_bytes(DIGEST)).value.store("b", b"merged", NOW + 50)  # as hivemind's searches do
    assert put(storage, "a", b"2", 40)
    clock[0] = NOW + 35
    assert held(storage)["a"] == b"2"


def test_strangers_cannot_fill_the_memory(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "MAX_KEY_BYTES", 10 * (100 + SLOT_BYTES))
    monkeypatch.setattr(dht_storage, "MAX_STORE_BYTES", 25 * (100 + KEPT_BYTES))
    storage = RecordStorage(lambda: clock[0])
    others = [DHTID.generate(source=b"%d" % number) for number in range(30)]
    assert sum(put(storage, f"peer {number}", bytes(100), 60) for number in range(10)) == 10
    assert put(storage, "peer 0", bytes(100), 80)
    for number, key in enumerate(others):
        assert storage.store_subkey(key, f"new {number}", bytes(100), NOW + 60)
        assert kept(storage) <= 25
    assert len(held(storage)) == 10, "those that came first have half of the room"
    assert not put(storage, "large", bytes(10 * 100 + 9 * SLOT_BYTES + 1), 60)
    clock[0] = NOW + 81
    assert storage.store_subkey(others[0], "after them", bytes(100), NOW + 120)
    assert kept(storage) == 1, "what is over takes no room, also where nobody looks"


def kept(storage: RecordStorage) -> int:
    return sum(len(item.value.data) for item in storage.data.values())


def test_fresh_identities_that_fill_the_store_keep_no_newcomer_out(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a thousand of them filled a holder in seconds, and every record after that was refused."""
    monkeypatch.setattr(dht_storage, "MAX_STORE_BYTES", 200 * (16_000 + KEPT_BYTES))
    storage, present = RecordStorage(lambda: clock[0], seed=1), list[bool]()
    first = [DHTID.generate(source=b"honest %d" % number) for number in range(5)]
    assert all(storage.store_subkey(key, "came first", bytes(1_000), NOW + 600) for key in first)
    for number in range(1_000):
        key = DHTID.generate(source=b"%d" % number)
        assert storage.store_subkey(key, f"flood {number // 16}", bytes(16_000), NOW + 3_000)
        if number % 50 == 0:
            assert put(storage, "newcomer", bytes(1_000), 600 + number / 1000)
        present.append("newcomer" in held(storage))
    assert sum(present) > 0.95 * len(present)
    assert all(key in storage for key in first)


def test_a_network_that_floods_gives_way_to_others(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_STORE_BYTES", 300 * (300 + KEPT_BYTES))
    storage = RecordStorage(lambda: clock[0], seed=1)
    honest = [DHTID.generate(source=b"honest %d" % number) for number in range(40)]
    for number in range(2_000):
        key = DHTID.generate(source=b"%d" % number)
        assert storage.store_subkey(key, f"flood {number}", bytes(300), NOW + 3_000, "203.0.113.0/24")
        if number >= 1_000 and number % 25 == 0:
            newcomer = number // 25 - 40
            assert storage.store_subkey(
                honest[newcomer], "honest", bytes(300), NOW + 600, f"8.8.{newcomer}.0/24"
            ) == (newcomer < MOST_RECORDS)
    assert sum(key in storage for key in honest) == MOST_RECORDS, "none of them gave way to the flood"


def calls_of(
    storage: RecordStorage, key: DHTID, subkey: str, nbytes: int, network: str = ""
) -> tuple[bool, int]:
    """Whether a record is stored, and the number of functions called for that, which no busy machine changes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        stored = storage.store_subkey(key, subkey, bytes(nbytes), NOW + 60, network)
    finally:
        sys.setprofile(None)
    return stored, calls


@pytest.mark.parametrize("records", [100, 3_000])
def test_what_a_refusal_costs_does_not_grow_with_what_is_kept(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    """Before: all that was kept was counted again for each, 100 ms of the event loop."""
    monkeypatch.setattr(dht_storage, "MAX_STORE_BYTES", records * (100 + KEPT_BYTES))
    storage = RecordStorage(lambda: clock[0], seed=1)
    keys = [DHTID.generate(source=b"%d" % number) for number in range(2 * records)]
    for number, key in enumerate(keys):
        peer = "many" if number < MOST_RECORDS else f"peer {number}"
        assert storage.store_subkey(key, peer, bytes(100), NOW + 60)
    stored, calls = calls_of(storage, keys[0], "large", MAX_KEY_BYTES)
    assert not stored
    assert calls < 60
    held_under = DHTID.from_bytes(DIGEST)
    stored, calls = calls_of(storage, held_under, "many", 100)
    assert not stored
    assert calls < 60
    stored, calls = calls_of(storage, held_under, "a newcomer", 100)
    assert stored
    assert calls < 600
    storage = RecordStorage(lambda: clock[0], seed=1)
    for number, key in enumerate(
        keys
    ):  # what came first is of the network that has most, and does not give way
        network = "203.0.113.0/24" if number < 0.6 * records else f"8.8.{number % 200}.0/24"
        storage.store_subkey(key, f"peer {number}", bytes(100), NOW + 60, network)
    for number in range(records // 20):
        storage.store_subkey(held_under, f"new {number}", bytes(100), NOW + 60, f"9.9.{number % 200}.0/24")
    stored, calls = calls_of(storage, held_under, "one more", 100, "203.0.113.0/24")
    assert calls < 600


def test_peers_that_have_gone_are_forgotten(clock: list[float]) -> None:
    storage = RecordStorage(lambda: clock[0])
    for number in range(500):
        clock[0] = NOW + number
        assert storage.store_subkey(
            DHTID.generate(source=b"%d" % number), f"peer {number}", b"x", clock[0] + 20
        )
        assert storage.peers <= 22


def test_a_record_renewed_again_and_again_leaves_nothing_behind(clock: list[float]) -> None:
    storage = RecordStorage(lambda: clock[0])
    for number in range(500):
        assert put(storage, "a", b"1", 60 + number)
    slots = storage.get(DHTID.from_bytes(DIGEST)).value
    assert max(len(storage.expiration_heap), len(slots.expiration_heap)) < 30
    assert held(storage) == {"a": b"1"}


def test_a_full_key_fits_an_answer(clock: list[float]) -> None:
    """However small its records are; else who fills it would keep everybody from reading it."""
    storage, number = RecordStorage(lambda: clock[0]), MAX_KEY_BYTES // (150 + SLOT_BYTES)
    length = len(ALICE.peer_id)
    assert all(put(storage, f"{n:0{length}}", bytes(150), 60) for n in range(number + 2))
    assert len(held(storage)) == number
    packed = MSGPackSerializer.dumps(storage.get(DHTID.from_bytes(DIGEST)).value)
    assert MAX_KEY_BYTES * 0.9 < len(packed) < ANSWER_BYTES
    assert number < MOST_SLOTS


def test_one_peer_keeps_few_records(clock: list[float]) -> None:
    storage = RecordStorage(lambda: clock[0])
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
    storage = RecordStorage(lambda: clock[0], seed=1)
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
    storage = RecordStorage(lambda: clock[0])
    storage.store(DHTID.from_bytes(DIGEST), msgpack.packb("plain"), NOW + 60)
    assert not put(storage, "a", b"1", 70)
