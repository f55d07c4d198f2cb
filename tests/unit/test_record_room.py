"""Room for records: what is counted is what is there, a flood drives out itself, and a refusal costs little."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.transport.record_room import Room

PLACES, SIZES = st.integers(0, 12), st.integers(1, 400)
NETWORKS = st.sampled_from(["", "a", "b", "c"])
FLOOD = "203.0.113.0/24"


def put(room: Room[int], place: int, nbytes: int, network: str) -> bool:
    out = room.giving_way(place, nbytes, network)
    for gone in out or ():
        assert gone != place
        room.give_back(gone)
    if out is not None:
        room.take(place, nbytes, network)
    return out is not None


@given(st.lists(st.tuples(st.booleans(), PLACES, SIZES, NETWORKS), max_size=60))
def test_what_is_counted_is_what_is_there(done: list[tuple[bool, int, int, str]]) -> None:
    room, there = Room[int](1_000, random.Random(1)), dict[int, tuple[int, str]]()
    for comes, place, nbytes, network in done:
        if not comes:
            room.give_back(place)
            there.pop(place, None)
            continue
        out = room.giving_way(place, nbytes, network)
        if out is None:
            continue
        for gone in out:
            room.give_back(gone)
            del there[gone]
        room.take(place, nbytes, network)
        there[place] = nbytes, network
        assert room.nbytes == sum(size for size, _ in there.values()) <= 1_000
        assert len(room) == len(there)
        by_network = Counter[str]()
        for size, name in there.values():
            by_network[name] += size
        assert room._of_network == by_network
        assert sum(there[one][0] for one in room._first) == room._first_bytes <= 500
        assert {*room._rest} == {*there} - room._first


def test_those_that_came_first_stay() -> None:
    room = Room[int](10_000, random.Random(1))
    for place in range(500):
        assert put(room, place, 100, "")
    assert all(room.giving_way(place, 100, "") == [] for place in range(50)), "each is still there"
    assert len(room) == 100


def test_a_network_gives_way_to_others_and_not_they_to_it() -> None:
    room = Room[int](10_000, random.Random(1))
    for place in range(300):
        assert put(room, place, 100, FLOOD)
    others = range(1_000, 1_020)
    assert all(put(room, place, 100, f"8.8.{place % 10}.0/24") for place in others)
    for place in range(300, 2_000):
        if place not in others:
            put(room, place, 100, FLOOD)
    assert all(room.giving_way(place, 100, "x") == [] for place in others), "each is still there"


def test_a_network_that_has_most_already_gets_nothing_of_the_others() -> None:
    room = Room[int](1_000, random.Random(1))
    for place in range(6):
        assert put(room, place, 100, FLOOD if place < 5 else "8.8.8.0/24")
    for place in range(6, 10):
        assert put(room, place, 100, f"8.8.{place}.0/24")
    assert not put(room, 10, 100, FLOOD)
    assert put(room, 11, 100, "9.9.9.0/24")
    assert not put(room, 12, 2_000, "9.9.9.0/24")
