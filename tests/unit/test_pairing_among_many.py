"""In a large stage: two are asked at a time, and the partner of the round before is not."""

from __future__ import annotations

import pytest

from node.rounds.meeting import Refusal
from node.rounds.pairing import MANY
from protocol.ground import PeerId
from tests.unit.pairings import (
    CROWD,
    A,
    B,
    C,
    agreed,
    answer,
    at,
    deliver,
    next_round,
    pairing,
    partner,
    propose,
)


def test_of_many_two_are_asked_at_a_time_and_never_one_twice() -> None:
    a = pairing(A)
    proposals = [propose(a, B, *CROWD) for _ in range(2)]
    assert len({proposal.pair.partner for proposal in proposals}) == 2
    assert a.propose([C, *CROWD], at(0)) is None
    answer(proposals[0], a, Refusal("busy"))
    assert propose(a, C, *CROWD).pair.partner != proposals[1].pair.partner


def test_of_two_that_agree_one_is_the_partner_and_the_other_is_to_be_told() -> None:
    a = pairing(A)
    first, second = (propose(a, *CROWD) for _ in range(2))
    b, c = (pairing(proposal.pair.partner) for proposal in (first, second))
    late = deliver(first, a, b)
    assert answer(second, a, deliver(second, a, c))
    assert not a.is_asking
    assert not answer(first, a, late), "b must be told"
    assert (partner(a), partner(c)) == (c.me, A)
    assert a.holds(second.pair)
    assert not a.holds(first.pair)


@pytest.mark.parametrize(("known", "again"), [(MANY, True), (MANY + 1, False)])
def test_among_many_the_partner_of_the_round_before_is_not_asked(known: int, again: bool) -> None:
    """Who was met is known, as not everybody is in a large stage: it would be met again more often than others."""
    others = [PeerId(f"p{number}") for number in range(known)]
    a, before = pairing(A), pairing(others[0])
    agreed(a, before)
    next_round(a)
    asked = set()
    for _ in range(MANY):
        proposal = propose(a, *others, steps=15)
        asked.add(proposal.pair.partner)
        answer(proposal, a, Refusal("engaged"), steps=15)
    assert asked == set(others) - (set() if again else {others[0]})
