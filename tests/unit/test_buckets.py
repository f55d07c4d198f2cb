"""Records of a large stage in buckets: who writes and reads where, and what readers conclude."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from statistics import fmean

import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.membership.buckets import LEAST, MOST, WANTED, StageSize, level_of
from node.membership.discovery import ALL_COPIES, is_due, look_at, read_stage, read_whole_stage
from node.membership.view import Member, View
from protocol.errors import RecordError
from protocol.ground import PeerId
from protocol.records.announcement import (
    MOST_LEVEL,
    Announcement,
    bucket_key,
    is_sampled,
    record_key,
    stage_key,
)
from protocol.records.identity import Identity
from protocol.records.records import key_digest, open_record, seal_record
from protocol.transport.base import COPIES

RUN = "r"
LIFETIME = 3_000.0


def names(count: int) -> list[str]:
    return [f"peer {number}" for number in range(count)]


@pytest.mark.parametrize("replicas", [1, 10, 128, 129, 1_000, 20_000, 10**6])
def test_a_bucket_holds_about_as_many_records_however_many_replicas_there_are(replicas: int) -> None:
    level = level_of(replicas, 0)
    assert replicas / 2**level <= MOST
    assert level == 0 or replicas / 2**level >= LEAST
    assert level_of(replicas, level) == level


def test_a_stage_that_grows_and_shrinks_a_little_keeps_its_level() -> None:
    level = level_of(1_000, 0)
    assert all(level_of(1_000 * factor, level) == level for factor in (0.6, 0.8, 1.25, 1.6))
    assert level_of(40, level) < level


def test_a_peer_has_one_bucket_and_one_in_so_many_is_in_the_sample() -> None:
    level, peers = 5, names(4_000)
    keys = Counter(record_key(RUN, 2, peer, level) for peer in peers)
    assert set(keys) == {bucket_key(RUN, 2, level, number) for number in range(32)}
    assert max(keys.values()) < 1.5 * min(keys.values())
    sampled = sum(is_sampled(peer, level) for peer in peers)
    assert 0.7 * 4_000 / 32 < sampled < 1.3 * 4_000 / 32
    assert {record_key(RUN, 2, peer, 0) for peer in peers} == {stage_key(RUN, 2)}
    assert all(is_sampled(peer, 0) for peer in peers)


def sized(levels: Iterable[int]) -> StageSize:
    """The size of a stage by this sample, once a bucket of each level has shown as many records as the sample."""
    size = StageSize()
    size.sampled(levels)
    for level, records in size.sample.items():
        if level:
            size.bucket_read(level, records)
    return size


def test_the_sample_tells_the_size_whatever_levels_are_in_it() -> None:
    rng, estimates = random.Random(1), []
    for trial in range(200):
        levels = [rng.choice([3, 4, 5]) for _ in range(1_000)]
        size = sized(level for number, level in enumerate(levels) if is_sampled(f"{trial}/{number}", level))
        estimates.append(size.estimate)
    assert fmean(estimates) == pytest.approx(1_000, rel=0.03)


def test_readers_go_through_all_buckets_in_orders_of_their_own() -> None:
    read = {}
    for reader in names(50):
        size = sized([4] * WANTED)
        read[reader] = [size.next_bucket(reader) for _ in range(16)]
        assert set(read[reader]) == {(4, number) for number in range(16)}
    first = Counter(order[0] for order in read.values())
    assert max(first.values()) <= 10
    assert len({tuple(order) for order in read.values()}) > 35


def test_while_levels_change_each_has_its_turns() -> None:
    size = sized([2] * 30 + [3] * 45)  # 120 replicas and 360
    turns = Counter(bucket[0] for _ in range(400) if (bucket := size.next_bucket("me")))
    assert turns[3] / 400 == pytest.approx(0.75, abs=0.03)


class Stage:
    """So many made-up replicas with records in an in-memory network, and readers of them."""

    def __init__(self, replicas: int) -> None:
        self.network = MemoryNetwork(1)
        self.seed = MemoryTransport(self.network, Identity.from_seed("seed"))
        self.identities = [Identity.from_seed(f"replica {number}") for number in range(replicas)]
        self.level = level_of(replicas, 0)

    async def start(self) -> None:
        await self.seed.start()
        value = Announcement(stage=0, state="serving", since=0.0, level=self.level).to_bytes()
        for identity in self.identities:
            me, expires = identity.peer_id, self.network.now() + LIFETIME
            keys = {record_key(RUN, 0, me, self.level)}
            if is_sampled(me, self.level):
                keys.add(stage_key(RUN, 0))
            island, now = await self.network.search(self.seed.peer_id), self.network.now()
            for key in keys:
                assert island.put(
                    key_digest(key), me, seal_record(identity, key, value, expires), expires, now
                )

    async def reader(self, name: str) -> MemoryTransport:
        transport = MemoryTransport(self.network, Identity.from_seed(name))
        await transport.start()
        await transport.connect(self.seed.addresses(), 5.0)
        return transport


def test_what_a_reader_knows_is_bounded_random_and_renewed() -> None:
    async def main() -> None:
        stage = Stage(1_500)
        await stage.start()
        known: Counter[str] = Counter()
        for number in range(12):
            transport, view = await stage.reader(f"reader {number}"), View()
            for _ in range(10):
                await read_stage(transport, RUN, 0, view)
            members = view.members(0, transport.now())
            assert WANTED <= len(members) <= view.most
            assert view.replicas(0, transport.now()) == pytest.approx(1_500, rel=0.35)
            known.update(member.peer for member in members)
        assert len(known) > 900  # of those that twelve readers could know at most, most are not the same
        in_sample = [known[i.peer_id] for i in stage.identities if is_sampled(i.peer_id, stage.level)]
        assert fmean(in_sample) < 1.5 * fmean(known[i.peer_id] for i in stage.identities), (
            "known as the others are"
        )
        whole = View(most=2_000)
        await read_whole_stage(transport, RUN, 0, whole)
        assert len(whole.members(0, transport.now())) == 1_500

    run_virtual(main())


def test_a_bucket_is_read_from_one_holder_and_from_all_where_that_one_hides_most_of_it() -> None:
    view, now = View(lambda: 0.0), 0.0
    view.sizes[0] = size = sized([3] * 64)
    size.looks = 1  # the sample is not due
    members = [
        Member(PeerId(f"{number}"), Announcement(stage=0, state="serving", since=0.0, level=3), 50.0)
        for number in range(64)
    ]

    def look(*shown: int) -> list[int]:
        reads, asked = look_at(view, RUN, 0, PeerId("me"), now), list[int]()
        with suppress(StopIteration):
            _, copies = next(reads)
            for count in shown:
                asked.append(copies)
                _, copies = reads.send(members[:count])
        assert len(asked) == len(shown)
        return asked

    assert look(60) == [1]
    assert look(10, 60) == [1, ALL_COPIES]
    assert len(view.members(0, now)) == 60
    assert not size.is_sample_due
    assert look(10, 10) == [1, ALL_COPIES]
    assert size.is_sample_due, "the stage has shrunk since"
    assert look(20, 60) == [COPIES, 1]
    assert not size.is_sample_due


@pytest.mark.parametrize("claimed", [1, 7, MOST_LEVEL])
@pytest.mark.parametrize(("honest", "liars"), [(2, 1), (2, 12), (2, 60), (100, 20)])
def test_records_with_a_level_that_no_bucket_bears_out_count_as_one_each_and_hide_nobody(
    claimed: int, honest: int, liars: int
) -> None:
    """Before: one record of level 20 was a stage of a million; honest ones went to buckets that nobody read."""
    view, reads, count = View(lambda: 0.0), Counter[str](), honest + liars

    def record(name: str, level: int) -> Member:
        return Member(PeerId(name), Announcement(stage=0, state="serving", since=0.0, level=level), 50.0)

    found = [record(f"honest {n}", 0) for n in range(honest)] + [
        record(f"l {n}", claimed) for n in range(liars)
    ]
    for _ in range(40):
        look = look_at(view, RUN, 0, PeerId("me"), 0.0)
        with suppress(StopIteration):
            key, _ = next(look)
            while True:
                reads[key] += 1
                key, _ = look.send(found if key == stage_key(RUN, 0) else [])
        assert view.sizes[0].level == 0, "an honest replica stays where all others look"
        assert view.replicas(0, 0.0) <= count
    assert len(view.members(0, 0.0)) == honest
    assert reads.pop(stage_key(RUN, 0)) == 40, "the key of a small stage is read at each look"
    assert sum(reads.values()) < 2 * 40 / 4, "what was not borne out is looked for now and then"


def test_in_a_large_stage_a_liars_levels_take_few_of_the_looks() -> None:
    """Before: all looks but one in a million went to the liar's buckets, and the others' ran out unread."""
    honest, lies = [3] * 60, [11, 15, MOST_LEVEL]
    size, read = StageSize(), Counter[int]()
    size.sampled([*honest, *lies])
    for _ in range(400):
        bucket = size.next_bucket("me")
        assert bucket is not None
        size.bucket_read(bucket[0], 60 if bucket[0] == 3 else 0)
        read[bucket[0]] += 1
    assert size.estimate == 60 * 8 + len(lies)
    assert size.level == 3
    assert read[3] > 0.8 * 400


def test_who_sits_on_the_keys_of_a_bucket_makes_no_stage_small() -> None:
    size = sized([4] * 64)
    for records in (60, 0, 70):
        size.bucket_read(4, records)
        assert size.estimate == 64 * 16
        assert size.level == 4


def test_a_level_that_a_crowd_moves_to_is_found_soon() -> None:
    size = sized([2] * 120)
    size.sampled([2] * 100 + [4] * 5)
    assert 4 in {bucket[0] for _ in range(3) if (bucket := size.next_bucket("me"))}
    size.bucket_read(4, 5)
    assert size.estimate == 100 * 4 + 5 * 16


def test_own_buckets_are_read_though_nobody_of_them_is_in_the_sample() -> None:
    """Where a flood of records makes a few honest replicas leave the stage's key, they still find each other."""
    size = sized([0] * 500)
    assert size.level
    assert {bucket[0] for _ in range(4) if (bucket := size.next_bucket("me"))} == {size.level}


def test_a_record_that_lies_where_its_signer_does_not_belong_is_not_read() -> None:
    """A level counts only of peers that are in its sample, which is drawn by their ids; and in their own bucket."""

    async def main() -> None:
        stage = Stage(2)
        await stage.start()
        transport, view = await stage.reader("reader"), View()
        island, now = await stage.network.search(stage.seed.peer_id), stage.network.now()
        for number in range(20):
            identity, expires = Identity.from_seed(f"liar {number}"), now + LIFETIME
            me, level = identity.peer_id, 4 if number % 2 else MOST_LEVEL
            value = Announcement(stage=0, state="serving", since=0.0, level=level).to_bytes()
            places = {stage_key(RUN, 0), *(bucket_key(RUN, 0, 4, n) for n in range(16))}
            for key in places - {record_key(RUN, 0, me, level)}:
                if not is_sampled(me, level):
                    sealed = seal_record(identity, key, value, expires)
                    assert island.put(key_digest(key), me, sealed, expires, now)
        await read_whole_stage(transport, RUN, 0, view)
        assert {m.peer for m in view.members(0, now)} == {i.peer_id for i in stage.identities}
        assert view.sizes[0].sample == {0: 2}

    run_virtual(main())


def test_a_record_of_a_bucket_is_no_record_of_another() -> None:
    identity, expires = Identity.from_seed("a"), 100.0
    key = record_key(RUN, 0, identity.peer_id, 3)
    sealed = seal_record(identity, key, b"", expires)
    assert open_record(key_digest(key), identity.peer_id, sealed, expires, 0.0)
    with pytest.raises(RecordError):
        open_record(key_digest(stage_key(RUN, 0)), identity.peer_id, sealed, expires, 0.0)


@pytest.mark.parametrize(
    ("levels", "every"),
    [
        ([], 1),
        ([0] * 5, 1),
        ([0] * 20, 2),
        ([0] * 50, 3),
        ([0] * 120, 3),
        ([4] * 30, 3),
        ([4] * 100, 3),
    ],
)
def test_the_more_records_a_look_brings_the_fewer_turns_are_used(levels: list[int], every: int) -> None:
    size = sized(levels)
    assert [size.is_turn_left_out() for _ in range(2 * every)] == ([False] + [True] * (every - 1)) * 2


def test_a_stage_of_which_nobody_is_known_is_looked_at_each_turn() -> None:
    view = View()
    view.sizes[0] = sized([4] * 64)
    assert all(is_due(view, 0, 0.0) for _ in range(6))


def test_where_many_are_new_each_turn_is_used() -> None:
    size = sized([4] * 64)
    for young, is_left_out in ((20, False), (2, True), (7, False)):
        size.looked([100.0] * young + [0.0] * (64 - young), now=120.0)
        size.turns = 1
        assert size.is_turn_left_out() == is_left_out
    size.looked([], now=120.0)
    assert not size.is_restless
