"""What a node believes of a stage's past: what it read, and what most others did; floods and lies are bounded."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from node.membership.past import DAYS, MOST_BYTES, MOST_OF_STAGE, MOST_WITNESSES, Past
from node.membership.view import Member
from protocol.ground import PeerId
from protocol.messages.peers import MOST_SHARED, PastRecord
from protocol.records.announcement import Announcement, record_key
from protocol.records.identity import Identity
from protocol.records.lineage import Lineage
from protocol.records.records import MAX_RECORD_BYTES, seal_record

RUN, TOTAL, LIFETIME = "run", 1_000, 45.0
NOW = 1_700_000_000.0
OLD, NEW = Lineage(0, NOW - 9_000), Lineage(1, NOW - 500)
ALICE = Identity.from_seed("alice")


class Clock:
    """Mutable state: the wall clock."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def past_of(clock: Clock | None = None) -> Past:
    return Past(RUN, lambda _: TOTAL, LIFETIME, clock or Clock())


def said(step: int = 100, lineage: Lineage = OLD, stage: int = 0, **changes: Any) -> Announcement:
    fields = {"stage": stage, "state": "serving", "since": 0.0, "step": step, "round": step // 10}
    begun = {"beginning": lineage.beginning, "begun": lineage.begun}
    return Announcement.model_validate(fields | begun | changes)


def record(
    identity: Identity = ALICE,
    step: int = 100,
    lineage: Lineage = OLD,
    expires: float = NOW - 600,
    first: float = NOW - 8_000,
    run: str = RUN,
    **changes: Any,
) -> PastRecord:
    """As a witness tells it of a member."""
    contents = said(step, lineage, **changes)
    key = record_key(run, contents.stage, identity.peer_id, 0)
    sealed = seal_record(identity, key, contents.to_bytes(), expires)
    return PastRecord(identity.peer_id, contents.stage, 0, sealed, expires, first)


def member(identity: Identity = ALICE, lifetime: float = LIFETIME, now: float = NOW, **given: Any) -> Member:
    told = record(identity, expires=now + lifetime, **given)
    step, lineage = given.get("step", 100), given.get("lineage", OLD)
    rest = {name: value for name, value in given.items() if name not in ("step", "lineage")}
    return Member(identity.peer_id, said(step, lineage, **rest), told.expires, sealed=told.record)


def witness(number: int) -> PeerId:
    return Identity.from_seed("witness", number).peer_id


# --- what it reads itself -------------------------------------------------------------------------


def test_the_last_record_of_a_member_and_when_it_was_read_first_are_kept() -> None:
    clock = Clock()
    past = past_of(clock)
    past.note(member(step=100))
    clock.now += 300
    past.note(member(step=150, now=clock.now))
    [one] = past.of(0)
    assert (one.peer, one.step, one.record.first, one.seen) == (ALICE.peer_id, 150, NOW, NOW + 300 + LIFETIME)
    assert past.has_changed
    assert past.of(0, without=ALICE.peer_id) == []
    clock.now += DAYS * 86_400 + 60
    assert past.of(0) == []
    assert past.shown([0]) == []


@pytest.mark.parametrize(
    "given",
    [
        {"state": "joining"},
        {"step": 0},
        {"step": TOTAL + 1},
        {"step": 10**9},
        {"lineage": Lineage(2**62, NOW)},
    ],
)
def test_a_record_that_cannot_be_is_not_kept(given: dict[str, Any]) -> None:
    past = past_of()
    past.note(member(**given))
    assert past.of(0) == []
    past.hear(witness(1), [record(**given)], None)
    assert past.of(0) == []


def test_a_flood_of_identities_and_of_lineages_drives_out_itself() -> None:
    clock = Clock()
    past = past_of(clock)
    past.note(member())
    clock.now += 600
    past.note(member(now=clock.now, step=200))
    for number in range(200):
        past.note(member(Identity.from_seed("flood", number), now=clock.now))
        past.note(member(Identity.from_seed("one"), now=clock.now, lineage=Lineage(number, NOW)))
        past.note(member(Identity.from_seed("long", number), lifetime=3_600, now=clock.now))
    found = past.of(0)
    assert len(found) == MOST_OF_STAGE
    assert ALICE.peer_id in {one.peer for one in found}
    for stage in range(1, 300):
        past.note(member(stage=stage, now=clock.now))
    assert len(past.to_bytes()) <= MOST_BYTES


# --- what others tell -----------------------------------------------------------------------------


def test_what_others_read_is_believed_but_not_passed_on() -> None:
    past = past_of()
    past.hear(witness(1), [record()], None)
    [one] = past.of(0)
    assert (one.peer, one.step, one.lineage) == (ALICE.peer_id, 100, OLD)
    assert past.shown([0]) == []


def forged() -> PastRecord:
    honest = record()
    return honest._replace(record=honest.record[:-1] + bytes([honest.record[-1] ^ 1]))


@pytest.mark.parametrize(
    "told",
    [
        forged(),
        record()._replace(peer=Identity.from_seed("bob").peer_id),
        record()._replace(stage=1),
        record()._replace(level=3),
        record()._replace(expires=NOW - 599),
        record(run="other"),
        record(expires=NOW - DAYS * 86_400 - 1),
        record(expires=NOW + 4_000),
        record()._replace(record=b""),
        record()._replace(record=b"\xff" * 100),
    ],
    ids=["forged", "not its", "stage", "level", "expiry", "run", "too old", "future", "empty", "noise"],
)
def test_what_is_forged_or_of_another_place_or_time_is_passed_over(told: PastRecord) -> None:
    past = past_of()
    past.hear(witness(1), [told], None)
    assert past.of(0) == []
    past.hear(witness(1), [told, record(Identity.from_seed("carol"))], None)
    assert [one.peer for one in past.of(0)] == [Identity.from_seed("carol").peer_id]


def test_nobody_is_believed_of_itself() -> None:
    past = past_of()
    past.hear(ALICE.peer_id, [record()], None)
    assert past.of(0) == []
    assert not past.proves(0, ALICE.peer_id, OLD, NOW)


def test_a_past_is_proved_by_what_was_read_here_before_or_by_more_than_half() -> None:
    peer, before = ALICE.peer_id, NEW.begun
    clock = Clock()
    past = past_of(clock)
    assert not past.proves(0, peer, OLD, before)
    past.note(member())
    assert not past.proves(0, peer, OLD, before), "it came after this replica began"
    assert past.proves(0, peer, OLD, NOW + 1)
    assert not past.proves(0, peer, NEW, NOW + 1)
    assert not past.proves(1, peer, OLD, NOW + 1)

    past, other = past_of(), Identity.from_seed("other")
    past.hear(witness(1), [record()], None)
    assert past.proves(0, peer, OLD, before)
    past.hear(witness(2), [record(other)], None)
    assert not past.proves(0, peer, OLD, before), "half of them"
    past.hear(witness(3), [record(), record(other)], None)
    assert past.proves(0, peer, OLD, before)
    past.hear(peer, [record(other)], None)
    assert past.proves(0, peer, OLD, before), "its own vote does not count"
    past.hear(witness(4), [record(first=NOW - 100)], None)
    assert not past.proves(0, peer, OLD, before), "read only since"


def test_the_witnesses_are_bounded() -> None:
    past = past_of()
    for number in range(3 * MOST_WITNESSES):
        past.hear(PeerId(f"witness {number}"), [record()] * MOST_SHARED, None)
    assert len(past.of(0)) <= MOST_WITNESSES * MOST_OF_STAGE
    assert f"Told by: {MOST_WITNESSES}" in repr(past)


# --- kept and shown -------------------------------------------------------------------------------


def test_what_is_shown_is_bounded_and_the_latest_first() -> None:
    past = past_of()
    for number in range(MOST_OF_STAGE):
        for stage in range(4):
            past.note(member(Identity.from_seed("m", number), stage=stage, lifetime=60 + number))
    assert len(past.shown(range(256))) <= MOST_SHARED
    assert len(past.shown([0, 0, 0])) <= MOST_OF_STAGE
    expires = [one.expires for one in past.shown([0])]
    assert expires == sorted(expires, reverse=True)
    assert {one.stage for one in past.shown([0, 1, 2, 3])} == {0, 1, 2, 3}


def test_what_was_kept_is_taken_up_again() -> None:
    past, again = past_of(), past_of()
    past.note(member())
    past.note(member(Identity.from_seed("bob"), step=7, stage=3))
    again.take_up(past.to_bytes())
    assert not past.has_changed
    assert again.of(0) == past.of(0)
    assert again.of(3) == past.of(3)
    clock = Clock()
    clock.now += DAYS * 86_400 + 100
    late = past_of(clock)
    late.take_up(past.to_bytes())
    assert late.of(0) == []


@pytest.mark.parametrize(
    "kept",
    [
        b"", b"\xff", b"\xc1" * 50, msgpack.packb(None), msgpack.packb(7), msgpack.packb({"a": 1}),
        msgpack.packb([1, 2]), msgpack.packb([[]]), msgpack.packb([["a", 0, 0, b"", 1.0]]),
        msgpack.packb([[None] * 6]), msgpack.packb([["p", [0], "x", "y", "z", {}]]),
        msgpack.packb([["p", 2**63, 0, b"", float("nan"), float("nan")]]), b"\0" * (MOST_BYTES + 1),
        b"\x91" * 5_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_damaged_bytes_are_passed_over(kept: bytes) -> None:
    past = past_of()
    past.take_up(kept)
    assert past.of(0) == []


def test_one_damaged_record_costs_no_other() -> None:
    kept = [list(forged()), list(record(Identity.from_seed("bob"))), [1], list(record(run="other"))]
    past = past_of()
    past.take_up(msgpack.packb(kept))
    assert [one.peer for one in past.of(0)] == [Identity.from_seed("bob").peer_id]


def test_records_as_large_as_they_may_be_are_kept_within_the_bound() -> None:
    past = past_of()
    name = "x" * (MAX_RECORD_BYTES - 1_000)  # of a later version's field
    for stage in range(40):
        for number in range(MOST_OF_STAGE):
            identity = Identity.from_seed("large", number)
            contents = msgpack.packb(said(stage=stage).model_dump() | {"later": name})
            key = record_key(RUN, stage, identity.peer_id, 0)
            sealed = seal_record(identity, key, contents, NOW + LIFETIME)
            past.note(Member(identity.peer_id, said(stage=stage), NOW + LIFETIME, sealed=sealed))
    kept = past.to_bytes()
    assert len(kept) <= MOST_BYTES
    again = past_of()
    again.take_up(kept)
    assert any(again.of(stage) for stage in range(40))
