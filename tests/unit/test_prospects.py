"""Whom a replica asks for a round, and whom the engaged tell it of."""

from __future__ import annotations

import random
from collections import Counter

from node.rounds.meeting import Refusal
from node.rounds.prospects import REFERRED_AFTER, Prospects, Seekers
from protocol.ground import PeerId


def test_each_that_may_agree_is_as_likely_to_be_asked() -> None:
    search, rng = Prospects(), random.Random(0)
    peers = [PeerId(name) for name in "abcdefgh"]
    for barred in peers[1:6]:
        search.bar(barred)
    chosen = Counter(search.choose(peers, peers[0], 0, rng) for _ in range(2000))
    assert set(chosen) == set(peers[6:])
    assert min(chosen.values()) > 900
    search.bar(peers[6])
    search.bar(peers[7], 3)
    assert search.choose(peers, peers[0], 2, rng) is None
    assert search.choose(peers, peers[0], 3, rng) == peers[7]


def test_each_behind_a_third_peer_is_half_as_likely_to_be_asked() -> None:
    search, rng = Prospects(), random.Random(0)
    near, *behind = peers = [PeerId(name) for name in "abcd"]
    chosen = Counter(search.choose(peers, PeerId("me"), 0, rng, behind) for _ in range(5_000))
    for peer in behind:
        assert 0.45 < chosen[peer] / chosen[near] < 0.55
    for barred in peers[1:3]:
        search.bar(barred)
    left = Counter(search.choose(peers, PeerId("me"), 0, rng, behind) for _ in range(5_000))
    assert 0.45 < left[behind[2]] / left[near] < 0.55


def test_one_behind_a_third_peer_is_asked_where_no_other_may_agree() -> None:
    search, rng = Prospects(), random.Random(0)
    near, behind = PeerId("near"), PeerId("behind")
    search.bar(near)
    assert {search.choose([near, behind], PeerId("me"), 0, rng, [behind]) for _ in range(200)} == {behind}


def test_late_in_a_search_one_that_the_engaged_told_of_comes_first() -> None:
    search, rng = Prospects(), random.Random(0)
    peers = [PeerId(str(number)) for number in range(60)]
    told, stranger = peers[59], PeerId("nobody that is known")
    for number in range(REFERRED_AFTER):
        assert search.choose(peers, peers[0], 0, random.Random(number)) != told
        search.note(peers[2 * number + 1], Refusal("engaged", peers[2 * number + 2], told), 0)
    search.note(peers[50], Refusal("engaged", peers[51], stranger), 0)
    assert search.choose(peers, peers[0], 0, rng) == told


def test_whoever_is_refused_hears_of_the_last_other_one_that_was_a_moment_ago() -> None:
    seekers, (a, b, c) = Seekers(), map(PeerId, "abc")
    assert seekers.refuse(a, 0.0, recent=1.0) is None
    assert seekers.refuse(a, 0.1, recent=1.0) is None
    assert seekers.refuse(b, 0.2, recent=1.0) == a
    assert seekers.refuse(c, 0.3, recent=1.0) == b
    assert seekers.refuse(a, 5.0, recent=1.0) is None


def test_one_that_was_told_of_is_worth_getting_to_know_late_in_a_search_unless_it_refused() -> None:
    search, told = Prospects(), PeerId("told")
    for number in range(REFERRED_AFTER):
        assert not search.wants(told)
        search.note(PeerId(f"a{number}"), Refusal("engaged", PeerId(f"b{number}"), told), 0)
    assert search.wants(told)
    search.note(told, Refusal("engaged"), 0)
    assert not search.wants(told)
