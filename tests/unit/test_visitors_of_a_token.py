"""A visit with a token is no use of it; visitors have places of their own, and one token lets in no crowd."""

from __future__ import annotations

import pytest

from protocol.access.admission import LEAST_VISITORS, VISIT_SECONDS, Admission
from protocol.access.revocations import Revocations, mark_of
from protocol.access.tokens import Token
from protocol.errors import RecordError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from tests.unit.test_tokens import ALICE, BOB, NOW, OWNER, RUN, Clock, admission, token


def crowd(count: int) -> list[PeerId]:
    return [Identity.from_seed("crowd", number).peer_id for number in range(count)]


def visits(asked: Admission, given: Token, peer: PeerId) -> bool:
    return asked.admits(peer, given.credential(peer))


def joins(asked: Admission, given: Token, peer: PeerId) -> bool:
    return asked.admits(peer, given.credential(peer), takes_part=True)


def test_a_visit_does_not_use_a_token_up_and_a_member_does() -> None:
    asked, given = admission(), token(uses=1)
    assert visits(asked, given, ALICE.peer_id)
    assert joins(asked, given, BOB.peer_id)
    assert not joins(asked, given, ALICE.peer_id)
    assert visits(asked, given, ALICE.peer_id)  # all the same
    assert asked.knows(ALICE.peer_id)


def test_a_member_that_visits_is_counted_once_and_takes_no_place() -> None:
    asked, given = admission(), token(uses=1)
    assert visits(asked, given, BOB.peer_id)
    assert joins(asked, given, BOB.peer_id)
    assert all(visits(asked, given, peer) for peer in crowd(LEAST_VISITORS))
    assert visits(asked, given, BOB.peer_id)


def test_a_visitors_own_token_is_no_use_of_it() -> None:
    """Failed before: with the token of a node a tool took itself for the one that it is for, and refused the node."""
    asked, given = admission(), token(uses=1)
    asked.check(asked.me, given.credential(asked.me))
    assert joins(asked, given, BOB.peer_id)


def test_a_nodes_own_use_counts() -> None:
    asked, given = admission(), token(uses=1)
    asked.check(asked.me, given.credential(asked.me), takes_part=True)
    assert not joins(asked, given, BOB.peer_id)


@pytest.mark.parametrize("uses", [1, 100])
def test_many_identities_with_one_token_are_as_few_as_it_says(uses: int) -> None:
    clock = Clock()
    asked, given, most = admission(clock), token(uses=uses), max(uses, LEAST_VISITORS)
    many = crowd(most + 30)
    assert [visits(asked, given, peer) for peer in many] == [True] * most + [False] * 30
    with pytest.raises(RecordError, match="as many visitors"):
        asked.check(many[-1], given.credential(many[-1]))
    assert not asked.knows(many[-1])
    for _ in range(20):  # they stay for long as long as they are heard
        clock.time += VISIT_SECONDS / 2
        assert all(asked.knows(peer) for peer in many[:most])
        assert not visits(asked, given, many[-1])
    assert sum(joins(asked, given, peer) for peer in many) == uses


def test_of_visitors_the_one_seen_longest_ago_gives_way() -> None:
    clock = Clock()
    asked, given, (*first, last) = admission(clock), token(), crowd(LEAST_VISITORS + 1)
    for peer in first:
        assert visits(asked, given, peer)
    clock.time += VISIT_SECONDS / 2
    assert asked.knows(first[0])
    clock.time += VISIT_SECONDS / 2
    assert visits(asked, given, last)
    assert asked.knows(first[0])
    assert not asked.knows(first[1])
    assert asked.knows(first[2])


def test_a_visitor_that_has_gone_gives_way_at_once_and_may_come_back() -> None:
    asked, given, (*first, last) = admission(), token(), crowd(LEAST_VISITORS + 1)
    for peer in first:
        assert visits(asked, given, peer)
    for peer in (last, BOB.peer_id, first[4], first[5]):
        asked.note_gone(peer)  # of others, too, that were never here
    assert visits(asked, given, first[4])
    assert visits(asked, given, last)
    assert not asked.knows(first[5])
    assert not visits(asked, given, first[5])


def test_a_clock_that_is_set_back_shuts_nobody_out() -> None:
    clock = Clock()
    asked, given, (*first, last) = admission(clock), token(), crowd(LEAST_VISITORS + 1)
    for peer in first:
        assert visits(asked, given, peer)
    clock.time -= 1_000
    assert visits(asked, given, last)


def test_visitors_of_one_token_take_no_places_of_anothers() -> None:
    asked, leaked, other = admission(), token(), token()
    assert sum(visits(asked, leaked, peer) for peer in crowd(50)) == LEAST_VISITORS
    assert visits(asked, other, ALICE.peer_id)
    assert joins(asked, other, BOB.peer_id)


def test_a_crowd_of_visitors_keeps_no_node_from_joining() -> None:
    asked, leaked = admission(), token(uses=1)
    assert sum(visits(asked, leaked, peer) for peer in crowd(50)) == LEAST_VISITORS
    shown = leaked.credential(ALICE.peer_id)
    assert asked.could_join(ALICE.peer_id, shown)
    assert joins(asked, leaked, ALICE.peer_id)
    assert not asked.could_join(BOB.peer_id, leaked.credential(BOB.peer_id))
    assert not asked.could_join(BOB.peer_id, shown)
    assert asked.could_join(ALICE.peer_id, shown)


def test_who_is_revoked_neither_visits_nor_could_join_and_leaves_its_place() -> None:
    asked, given = admission(), token(uses=4)
    assert all(visits(asked, given, peer) for peer in [ALICE.peer_id, *crowd(LEAST_VISITORS - 1)])
    assert not visits(asked, given, BOB.peer_id)
    assert asked.adopt(Revocations(NOW, frozenset({mark_of(ALICE.public_key)})).sign(RUN, OWNER))
    assert asked.shut_out() == [ALICE.peer_id]
    assert not asked.could_join(ALICE.peer_id, given.credential(ALICE.peer_id))
    assert visits(asked, given, BOB.peer_id)
