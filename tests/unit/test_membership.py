"""The view: who serves what, from records that expire and from own experience."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.membership.ledger import ACQUAINTED_SECONDS, OFTEN_WRONG, PROOFS, thinned
from node.membership.view import MAX_SUSPECT_SECONDS, SUSPECT_SECONDS, View
from protocol.errors import RecordError
from protocol.ground import PeerId, Record
from protocol.records.announcement import Announcement, State

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def announced(stage: int = 0, state: State = "serving", step: int = 0) -> Announcement:
    return Announcement(stage=stage, state=state, since=0.0, step=step)


class Clock:
    """Elapsed seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def view_of(clock: Clock | None = None, **peers: Announcement) -> View:
    view = View(clock or Clock())
    for peer, announcement in peers.items():
        view.update(PeerId(peer), announcement, expires=100.0)
    return view


def test_the_replicas_of_a_stage_come_sorted_and_without_the_others() -> None:
    view = view_of(c=announced(), a=announced(), b=announced(stage=1))
    assert view.serving(0, now=0) == [A, C]
    assert view.serving(1, now=0) == [B]
    assert view.serving(2, now=0) == []


@pytest.mark.parametrize(
    ("state", "is_member", "serves", "holds"),
    [
        ("joining", True, False, False),
        ("serving", True, True, True),
        ("finished", True, False, True),
        ("leaving", False, False, False),
    ],
)
def test_what_a_state_means(state: State, is_member: bool, serves: bool, holds: bool) -> None:
    view = view_of(a=announced(state=state))
    assert bool(view.members(0, 0)) == is_member
    assert bool(view.serving(0, 0)) == serves
    assert bool(view.holding(0, 0)) == holds


def test_a_record_that_ran_out_counts_no_more_and_is_dropped_once() -> None:
    view = view_of(a=announced(), b=announced())
    view.update(B, announced(), expires=200.0)
    assert view.serving(0, now=100.0) == [B]
    assert [member.peer for member in view.expire(now=100.0)] == [A]
    assert [member.peer for member in view.expire(now=100.0)] == []


def test_the_record_that_expires_last_counts() -> None:
    view = view_of(a=announced(step=7))
    view.update(A, announced(step=3), expires=90.0)  # an old one, replayed
    assert view.members(0, 0)[0].announcement.step == 7
    view.update(A, announced(stage=1, step=8), expires=110.0)  # it moved
    assert view.members(0, 0) == []
    assert view.members(1, 0)[0].announcement.step == 8


def test_a_suspect_is_left_alone_for_longer_with_each_failure_up_to_a_limit() -> None:
    clock = Clock()
    view = view_of(clock, a=announced())
    pauses = []
    for _ in range(8):
        view.suspect(A)
        began = clock.now
        while not view.serving(0, now=0):
            clock.now += 0.5
        pauses.append(clock.now - began)
    assert pauses[:3] == [SUSPECT_SECONDS, 2 * SUSPECT_SECONDS, 4 * SUSPECT_SECONDS]
    assert pauses[-1] == MAX_SUSPECT_SECONDS


def test_requests_under_way_when_a_peer_falls_under_suspicion_fail_with_the_first_one() -> None:
    clock = Clock()
    view = view_of(clock, a=announced())
    clock.now = 10.0
    for _ in range(6):
        view.suspect(A, asked=4.0)
    clock.now = 10.0 + SUSPECT_SECONDS
    assert view.serving(0, now=0) == [A]
    clock.now = 20.0
    view.suspect(A, asked=13.0)
    clock.now = 20.0 + SUSPECT_SECONDS
    assert view.serving(0, now=0) == []


def test_a_wall_clock_that_is_set_neither_frees_a_suspect_nor_keeps_it() -> None:
    clock = Clock()
    view = View(clock)
    view.update(A, announced(), expires=1e6)
    view.suspect(A)
    assert view.serving(0, now=7200.0) == []  # two hours ahead all at once
    clock.now = SUSPECT_SECONDS
    assert view.serving(0, now=-7200.0) == [A]


def test_a_wall_clock_that_jumps_makes_nobody_gone_before_records_are_read_again() -> None:
    view = view_of(a=announced())
    view.clock_jumped(3600.0)
    assert view.serving(0, now=3600.0 + 99.0) == [A]
    assert [member.peer for member in view.expire(now=3600.0 + 99.0)] == []
    assert [member.peer for member in view.expire(now=3600.0 + 100.0)] == [A]
    view.update(B, announced(), expires=3700.0)
    view.clock_jumped(-3600.0)
    assert view.serving(0, now=99.0) == [B]
    assert view.serving(0, now=100.0) == []


def test_a_suspect_is_a_member_still() -> None:
    view = view_of(a=announced())
    view.suspect(A)
    assert view.holding(0, 0.0) == []
    assert [member.peer for member in view.members(0, 0.0)] == [A]


def test_one_that_does_as_asked_is_trusted_at_once() -> None:
    clock = Clock()
    view = view_of(clock, a=announced())
    for _ in range(5):
        view.suspect(A)
    view.trust(A)
    view.trust(C)  # never heard of
    assert view.serving(0, 0.0) == [A]
    view.suspect(A)
    clock.now = SUSPECT_SECONDS
    assert view.serving(0, 0.0) == [A]  # and starts again


def test_nothing_is_kept_of_peers_that_are_gone() -> None:
    view = view_of(a=announced())
    view.expire(now=100.0)
    view.suspect(A)  # a call to it failed only now
    view.expire(now=101.0)
    view.update(A, announced(), expires=200.0)  # it is back
    assert view.serving(0, now=101.0) == [A]


def test_an_announcement_survives_the_dht() -> None:
    announcement = Announcement(
        stage=3,
        state="serving",
        since=1.5,
        step=7,
        round=2,
        loss=2.25,
        tokens_per_second=10.0,
        addresses=["/x"],
    )
    assert Announcement.read(Record(A, announcement.to_bytes(), 9.0)) == announcement


@given(value=st.binary(max_size=200))
def test_a_malformed_announcement_is_a_record_error_and_nothing_worse(value: bytes) -> None:
    with pytest.raises(RecordError):
        Announcement.read(Record(A, value, 9.0))


# --- networks ---------------------------------------------------------------------------------


def at(address: str) -> Announcement:
    return Announcement(stage=0, state="serving", since=0.0, addresses=[address])


def test_where_a_connection_comes_from_counts_and_not_what_the_record_says() -> None:
    view = view_of(
        a=at("/ip4/9.9.9.1/tcp/4000"), b=at("/ip4/9.9.9.2/tcp/4000"), c=at("/ip4/8.8.8.1/tcp/4000")
    )
    assert view.group_of(A) == view.group_of(B) != view.group_of(C)
    view.met_at(C, ["/ip4/9.9.9.77/tcp/51234"])
    assert view.group_of(C) == view.group_of(A)
    view.update(C, at("/ip4/7.7.7.1/tcp/4000"), expires=200.0)
    view.met_at(C, [])
    assert view.group_of(C) == view.group_of(A)


def test_who_has_proved_its_work_for_an_hour_counts_for_itself() -> None:
    clock = Clock()
    view = view_of(clock, a=at("/ip4/9.9.9.1/tcp/4000"), b=at("/ip4/9.9.9.2/tcp/4000"))
    for _ in range(PROOFS):
        view.ledger.record_check(A, True, clock(), OFTEN_WRONG)
    assert view.group_of(A) == view.group_of(B)
    clock.now = ACQUAINTED_SECONDS
    assert view.group_of(A) == A
    assert view.shares([A, B]).of_peer == {A: 0.5, B: 0.5}


def test_of_a_crowded_network_as_many_are_kept_as_twice_the_others() -> None:
    peers = [PeerId(f"{number:03}") for number in range(520)]
    kept = thinned(peers, lambda peer: peer if int(peer) < 20 else "crowd", random.Random(1))
    assert len(kept) == 22
    assert kept == sorted(kept)
    assert thinned(peers, lambda peer: "all", random.Random(1)) == peers


@pytest.mark.parametrize(("finished", "most"), [(0, False), (2, False), (3, True), (4, True)])
def test_most_have_finished_when_more_than_half_say_so(finished: int, most: bool) -> None:
    view = View()
    for number in range(4):
        state: State = "finished" if number < finished else "serving"
        view.update(PeerId(f"peer {number}"), Announcement(stage=0, state=state, since=0.0), 100.0)
    assert view.most_have_finished(0, 1.0) is most
    assert not view.most_have_finished(1, 1.0), "nobody is known"
    assert not view.most_have_finished(0, 101.0), "their records are over"


def test_people_are_named_by_their_names_and_two_of_one_name_by_their_keys_too() -> None:
    view = View(lambda: 0.0)
    for peer, name in {
        "12D3KooWabcdefgh": "Noor",
        "12D3KooWijkmnopq": "Sam",
        "12D3KooWrstuvwxy": "sam ",
    }.items():
        view.update(PeerId(peer), announced().model_copy(update={"name": name}), expires=1.0)
    assert view.called("12D3KooWabcdefgh") == "Noor"
    assert view.called("12D3KooWijkmnopq") == "Sam (…ijkmnopq)"
    assert view.called("12D3KooWrstuvwxy") == "sam (…rstuvwxy)"
    assert view.called("12D3KooWzzzzzzzz") == "…zzzzzzzz"
