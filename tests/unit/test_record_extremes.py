"""Records with each field at its extremes, through all that reads records: nothing raises, nobody honest vanishes."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.inspect.observer import Sighting
from node.membership.capacity import Capacities, next_move, peers_of, surveyed
from node.membership.discovery import look_at
from node.membership.hearsay import overdue
from node.membership.past import Past
from node.membership.stage_choice import LinkTable, Volumes, better_stage, choose_stage, excess_seconds
from node.membership.view import Member, View
from node.pipeline.gradient_screen import lag
from node.rounds.pace import others_among, steps_of_round
from node.state.copies import is_recent
from protocol.errors import RecordError
from protocol.ground import PeerId, Record
from protocol.records.announcement import Announcement, Claim, stage_key
from protocol.records.identity import Identity
from protocol.records.lineage import UNDATED
from tests.unit.test_hostile_records import board_of, on_a_terminal

RUN, NOW, LIFETIME, STAGES = "r", 1.7e9, 60.0, 2
WORK = [1.0] * STAGES
FLOATS = st.sampled_from(
    [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, -5e-324, 0.0, NOW, 1e15]
)
COUNTS = st.sampled_from([0, 1, 10**18, 2**63 - 1, 2**63, -1, 2**64 - 1])
PEER_END = Identity.from_seed("end").peer_id[-16:]
LINKS = st.lists(st.tuples(st.just(PEER_END), FLOATS, st.none() | FLOATS, FLOATS), max_size=2)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "stage": st.sampled_from([0, 1, 2, 2**63 - 1]),
    "state": st.sampled_from(["joining", "serving", "finished", "leaving"]),
    "since": FLOATS,
    "step": COUNTS,
    "round": COUNTS,
    "loss": st.none() | FLOATS,
    "tokens_per_second": FLOATS,
    "capacity": st.none() | FLOATS,
    "may_serve": st.lists(COUNTS, max_size=3),
    "addresses": st.lists(st.sampled_from(["", "/ip4", "/ip4/8.8.8.8/tcp/99999", "x" * 256]), max_size=3),
    "name": st.sampled_from(["", "\x1b[2J", "x" * 32]),
    "links": LINKS,
    "level": st.sampled_from([0, 1, 20, 21, -1]),
    "beginning": COUNTS,
    "begun": FLOATS,
}
# Each field alone as a liar sets it, or several of them
LIES = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda name: st.fixed_dictionaries(
        {name: FIELDS[name]}, optional={k: v for k, v in FIELDS.items() if k != name}
    )
)
HONEST = [(stage, f"honest {stage} {number}") for stage in range(STAGES) for number in range(3)]


def member(name: str, said: dict[str, Any]) -> Member | None:
    """The member as its record is read; None for one that is refused."""
    peer = Identity.from_seed(name).peer_id
    usual = Announcement(
        stage=0, state="serving", since=NOW - 600.0, step=100, round=10, capacity=1.0
    ).model_dump()
    record = Record(peer, msgpack.packb(usual | said), NOW + LIFETIME)
    try:
        return Member(peer, Announcement.read(record), record.expires, sealed=b"x")
    except RecordError:
        return None


@given(st.lists(LIES, min_size=1, max_size=3))
def test_nothing_that_reads_records_raises_and_nobody_vanishes(lies: list[dict[str, Any]]) -> None:
    told = [m for number, said in enumerate(lies) if (m := member(f"liar {number}", said)) is not None]
    honest = [m for stage, name in HONEST if (m := member(name, {"stage": stage})) is not None]
    view, past = View(lambda: 0.0), Past(RUN, lambda _: 1_000, LIFETIME, lambda: NOW)
    view.noted = past.note
    for _ in range(10):
        for stage in range(STAGES):
            look = look_at(view, RUN, stage, PeerId("me"), NOW)
            with suppress(StopIteration):
                key, _ = next(look)
                while True:
                    of_stage = [m for m in honest + told if m.announcement.stage == stage]
                    key, _ = look.send(of_stage if key == stage_key(RUN, stage) else [])
    for stage in range(STAGES):
        assert {m.peer for m in honest if m.announcement.stage == stage} <= {
            m.peer for m in view.members(stage, NOW)
        }
        assert view.level(stage) == 0
        assert 3 <= view.replicas(stage, NOW) <= 3 + len(told)
    decide(view)
    remember(view, past)
    sightings = [Sighting(m, None) for m in honest + told]
    on_a_terminal(sightings)
    board_of(sightings)


def decide(view: View) -> None:
    """Choose a stage, move, pace and compare by these records."""
    peers = surveyed(p for stage in range(STAGES) for p in peers_of(view, stage, NOW))
    arrivals = [(p.since, p.peer) for p in peers]
    assert choose_stage(peers, WORK, arrivals, (NOW, PeerId("me")), range(STAGES)) in range(STAGES)
    for p in peers:
        better_stage(peers, WORK, p.peer, range(STAGES))
    next_move(peers, WORK, {}, NOW)
    next_move(peers, WORK, {p.peer: 1 - p.stage for p in peers}, NOW)
    assert all(0 < one < 1e9 for one in Capacities(peers, WORK).of), (
        "a record counts as four median ones at most"
    )
    stages = [view.members(stage, NOW) for stage in range(STAGES)]
    lag(1.0, *stages)
    table = LinkTable()
    for members in stages:
        others = others_among(members, PeerId("me"))
        assert 1 <= steps_of_round("time", 5, 1.0, [other.tokens_per_second for other in others]) <= 20
        for one in members:
            table.add(one.peer, one.announcement.links)
        overdue(members, NOW, LIFETIME)
        view.thinned([m.peer for m in members], random.Random(1))
    excess_seconds(PeerId("me"), {0: [m.peer for m in stages[0]]}, table, Volumes(1, 1, 1, 1), 0)


def remember(view: View, past: Past) -> None:
    """Conclude about lineages and the past: no step that the run does not have is remembered."""
    for stage in range(STAGES):
        found = past.of(stage)
        assert all(0 < one.step <= 1_000 for one in found)
        assert all(one.lineage.next(NOW).beginning <= 1_000_000 for one in found)
        for one in found:
            is_recent(1, NOW, one, 5)
            past.proves(stage, one.peer, UNDATED, NOW)
    past.take_up(past.to_bytes())
    for m in (m for stage in range(STAGES) for m in view.members(stage, NOW)):
        lineage = m.announcement.lineage
        Announcement(
            stage=0, state="serving", since=NOW, beginning=lineage.next(NOW).beginning, begun=lineage.begun
        )
        lineage.is_before(UNDATED, LIFETIME)
        lineage.joined(UNDATED)


@given(FLOATS, COUNTS, COUNTS)
def test_a_claim_of_any_time_is_refused_or_compares(since: float, source: int, target: int) -> None:
    said = {"since": since, "source": source, "target": target, "withdrawn": False}
    record = Record(PeerId("p"), msgpack.packb(said), NOW + LIFETIME)
    with suppress(RecordError):
        claim = Claim.read(record)
        assert abs(claim.since) <= 1e15
        assert (claim.since < NOW) + (claim.since == NOW) + (claim.since > NOW) == 1


@pytest.mark.parametrize(("own", "is_slow"), [(1.0, False), (0.1, True)])
@pytest.mark.parametrize("lies_in", range(2), ids=["the stage before", "this stage"])
def test_one_record_does_not_decide_which_stage_is_slow(own: float, is_slow: bool, lies_in: int) -> None:
    stages = [
        [
            found
            for number, capacity in enumerate([honest, honest, 1e15 if stage == lies_in else honest])
            if (found := member(f"{stage} {number}", {"stage": stage, "capacity": capacity})) is not None
        ]
        for stage, honest in enumerate([1.0, own])
    ]
    compared = lag(own, stages[1], stages[0])
    assert compared is not None
    assert compared.is_too_slow == is_slow
