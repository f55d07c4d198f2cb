"""Records from members beside the DHT: who is asked, what is shown, and that nobody has to be believed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.membership.buckets import StageSize
from node.membership.hearsay import (
    ASKED,
    MOST_BYTES,
    SHOWN_TO,
    audience,
    hear_about,
    hear_of,
    overdue,
    serve_records,
    show,
    spread_out,
)
from node.membership.membership import Membership
from node.membership.view import Member, View
from protocol.ground import PeerId, Record
from protocol.messages.peers import GetRecord, GetRecords, Introduce, Records, SharedRecord
from protocol.records.announcement import Announcement, record_key, stage_key
from protocol.records.identity import Identity
from protocol.records.records import seal_record
from protocol.rpc.door import Door
from protocol.rpc.rpc import Answer, Request
from tests.unit.two_peers import Two, in_virtual_time, two_peers

LIFE = 60.0
RUN = "run"


def member(name: str, expires: float, stage: int = 0, run: str = RUN, place: str = "9.1.1.1") -> Member:
    identity = Identity.from_seed(name)
    said = Announcement(
        stage=stage, state="serving", since=0.0, addresses=[f"/ip4/{place}/tcp/4000/p2p/{identity.peer_id}"]
    )
    key = record_key(run, stage, identity.peer_id, 0)
    return Member(
        identity.peer_id, said, expires, sealed=seal_record(identity, key, said.to_bytes(), expires)
    )


@dataclass
class Asking:
    two: Two
    known: View  # the server's
    found: View  # the asker's
    membership: Membership

    async def hear(self, *stages: int) -> set[PeerId]:
        await hear_of(self.membership, [self.two.address], stages or (0,))
        return set(self.found.peers())


@asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    async with two_peers() as two:
        known, found = View(), View()
        signed: Any = SimpleNamespace(run_id=RUN, manifest=SimpleNamespace(stages=4))
        serve_records(two.server, signed, known, None)
        none = cast(Any, None)
        yield Asking(two, known, found, Membership(two.caller, signed, found, none, none, none, none))


@in_virtual_time
async def test_a_member_shows_others_and_itself() -> None:
    async with asking() as a:
        now = a.two.network.now()
        others = [member(f"peer {n}", now + LIFE, stage=n % 2) for n in range(6)]
        a.known.take(others)
        server = Identity.from_seed("server")
        own = seal_record(server, stage_key(RUN, 1), others[1].announcement.to_bytes(), now + LIFE)
        a.two.server.introduction = Introduce(stage=1, record=own, expires=now + LIFE)
        assert await a.hear(0) == {others[n].peer for n in (0, 2, 4)}
        assert await a.hear(0, 1) == {m.peer for m in others} | {server.peer_id}
        assert all(m.sealed for m in a.found.members(0, now)), "to be shown to others"


@in_virtual_time
async def test_what_is_not_signed_for_this_place_is_not_believed() -> None:
    async with asking() as a:
        now = a.two.network.now()
        good, other = member("good", now + LIFE), member("other", now + LIFE)
        shown = {
            "of another run": member("b", now + LIFE, run="another"),
            "over": member("d", now - 1.0),
            "for ever": member("e", now + 1e6),
        }
        records = [SharedRecord(m.peer, 0, 0, m.sealed, m.expires) for m in (good, *shown.values())]
        records += [
            SharedRecord(other.peer, 0, 0, good.sealed, good.expires),  # under another's name
            SharedRecord(other.peer, 0, 0, other.sealed, other.expires + 1.0),
            SharedRecord(other.peer, 0, 1, other.sealed, other.expires),
            SharedRecord(other.peer, 0, 0, b"no record", other.expires),
            SharedRecord(other.peer, 3, 0, other.sealed, other.expires),
        ]

        async def lie(request: Request[GetRecords]) -> Answer[Records]:
            return Answer(Records(records=records))

        a.two.server.handle(GetRecords.answered_by(lie))
        assert await a.hear(0, 3) == {good.peer}


@in_virtual_time
async def test_an_answer_is_small_and_one_network_does_not_fill_it() -> None:
    async with asking() as a:
        now = a.two.network.now()
        honest = [member(f"honest {n}", now + LIFE, place=f"9.{n}.1.1") for n in range(10)]
        many = [member(f"many {n}", now + LIFE, place=f"8.8.8.{n}") for n in range(90)]
        a.known.take([*honest, *many])
        heard = await a.hear(0)
        assert len(heard & {m.peer for m in honest}) == len(honest)
        records = (await a.two.ask(GetRecords(stages=[0]), traffic=None))[0].records
        assert sum(len(shared.record) for shared in records) <= MOST_BYTES


def test_those_that_are_asked_are_of_many_networks() -> None:
    networks = {PeerId(f"sybil {n}"): "8.8.8.0/24" for n in range(50)}
    networks |= {PeerId(f"honest {n}"): f"9.{n}.1.0/24" for n in range(3)}
    for seed in range(20):
        drawn = spread_out(networks, random.Random(seed))
        assert len(drawn) == ASKED
        assert sum(peer.startswith("honest") for peer in drawn) == 3
    assert spread_out({}, random.Random(1)) == []


def test_whose_record_was_not_renewed_is_overdue() -> None:
    members = [member("a", 100.0), member("b", 115.0), member("c", 130.0)]
    assert overdue(members, now=75.0, lifetime=60.0) == [members[0].peer]
    assert overdue(members, now=85.0, lifetime=60.0) == [members[0].peer, members[1].peer]


@in_virtual_time
async def test_who_asks_shows_its_own_record_and_no_other() -> None:
    async with asking() as a:
        now = a.two.network.now()
        caller, other = member("caller", now + LIFE), member("other", now + LIFE)
        a.two.caller.introduction = Introduce(stage=0, record=caller.sealed, expires=caller.expires)
        await a.hear(0)
        assert a.known.peers() == [caller.peer]
        named = [SharedRecord(other.peer, 0, 0, other.sealed, other.expires)]
        await a.two.ask(GetRecords(stages=[0], own=named), traffic=None)
        assert a.known.peers() == [caller.peer]


@in_virtual_time
async def test_one_that_a_peer_has_named_is_known_by_its_record_afterwards() -> None:
    async with asking() as a:
        now = a.two.network.now()
        caller, named, other = (member(name, now + LIFE) for name in ("caller", "named", "other"))
        a.two.caller.introduction = Introduce(stage=0, record=caller.sealed, expires=caller.expires)
        a.known.take([named, other])
        await hear_about(a.membership, 0, a.two.address, other.peer)
        assert a.found.peers() == [other.peer]
        assert a.found.members(0, now)[0].sealed == other.sealed
        nobody = member("nobody", now + LIFE).peer
        for unknown in (nobody, PeerId("no peer id at all"), PeerId("")):
            await hear_about(a.membership, 0, a.two.address, unknown)
        await hear_about(a.membership, 1, a.two.address, named.peer)  # not of that stage
        assert a.found.peers() == [other.peer]


@in_virtual_time
async def test_whoever_names_a_peer_and_does_not_show_its_record_is_waited_for_no_longer_than_told() -> None:
    async with asking() as a:

        async def never(request: Request[GetRecord]) -> Answer[Records]:
            await asyncio.sleep(LIFE)
            return Answer(Records(records=[]))

        a.two.server.handle(GetRecord.answered_by(never))
        before = a.two.network.now()
        await hear_about(a.membership, 0, a.two.address, member("named", before + LIFE).peer, deadline=0.25)
        assert a.two.network.now() - before == pytest.approx(0.25, abs=0.01)


@in_virtual_time
async def test_stages_are_named_once_and_only_those_that_there_are() -> None:
    """Strangers ask: what an answer costs, and what is kept for it, does not grow with what they name."""
    async with asking() as a:
        now = a.two.network.now()
        others = [member(f"peer {n}", now + LIFE) for n in range(3)]
        a.known.take(others)
        again, _ = await a.two.ask(GetRecords(stages=[0] * 200), traffic=None)
        assert sorted(shared.peer for shared in again.records) == sorted(m.peer for m in others)
        looked_at, members = list[int](), a.known.members

        def seen(stage: int, now: float) -> list[Member]:
            looked_at.append(stage)
            return members(stage, now)

        setattr(a.known, "members", seen)  # noqa: B010  a view keeps what it is asked for
        nowhere, _ = await a.two.ask(GetRecords(stages=[10**15 + n for n in range(200)]), traffic=None)
        assert nowhere.records == []
        assert looked_at == []


def test_of_members_that_show_themselves_those_of_stages_that_are_read_are_noted() -> None:
    view = View(lambda: 0.0)
    view.sizes[1] = StageSize()
    shown = [
        member("of the stage", 100.0, stage=1),
        *(member(f"far {n}", 100.0, stage=10**9 + n) for n in range(9)),
    ]
    for one in shown:
        view.introduced(Record(one.peer, b"", one.expires, sealed=one.sealed), one.announcement)
    assert view.peers() == [shown[0].peer]


@in_virtual_time
async def test_who_begins_to_serve_a_large_stage_is_known_at_once_to_some_that_would_send_to_it() -> None:
    async with two_peers() as two:
        now, view = two.network.now(), View()
        view.sizes[1] = StageSize()
        door = Door(RUN, {}, lambda peer: None, two.network.now, noted=view.introduced)
        two.server.open_door(door)
        await show(two.caller, [two.address])  # nothing is to be shown yet
        one = member("caller", now + LIFE, stage=1)
        two.caller.introduction = Introduce(stage=1, record=one.sealed, expires=one.expires)
        await show(two.caller, [two.address, Identity.from_seed("dead").peer_id])
        assert view.peers() == [one.peer]


def test_a_record_is_shown_to_members_of_the_stage_before_where_they_do_not_look_at_each_turn() -> None:
    view, rng = View(lambda: 0.0), random.Random(1)
    view.take(member(f"peer {n}", LIFE, stage=n % 2) for n in range(80))
    senders = {m.peer for m in view.members(0, 0.0)}
    assert audience(view, 1, 0.0, rng) == [], "as far as is known a small stage"
    view.sizes[1].sampled([3] * 64)
    first, second = audience(view, 1, 0.0, rng), audience(view, 1, 0.0, rng)
    assert set(first) | set(second) <= senders
    assert len(set(first)) == SHOWN_TO < len({*first, *second})
    assert audience(view, 0, 0.0, rng) == [], "nobody sends to the first"
