"""Pairs of a stage most of which nobody can dial: fewer go through third peers, and every two still meet."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from node.rounds.pairing import Pairing
from protocol.ground import PeerId
from tests.unit.pairings import K, answer, at, deliver, next_round, pairing, partner

PUBLIC = [PeerId("public")]
HIDDEN = [PeerId(f"hidden {number}") for number in range(4)]
LATE = K - 6  # steps of a round: everybody looks for a partner


def look(member: Pairing, members: dict[PeerId, Pairing], hidden: list[PeerId]) -> None:
    """Let a replica ask one after another until it has a partner, or nobody is left."""
    others = [peer for peer in members if peer != member.me]
    behind = hidden if member.me in hidden else []
    while member.current is None and (proposal := member.propose(others, at(LATE), behind)):
        other = members[proposal.pair.partner]
        answer(proposal, member, deliver(proposal, member, other, LATE), LATE)


def pairs(hidden: list[PeerId], rounds: int, seed: int) -> Counter[frozenset[PeerId]]:
    """The pairs of so many rounds; all go through third peers between two that are `hidden`."""
    dice = random.Random(seed)
    members = {peer: pairing(peer, seed=seed) for peer in [*PUBLIC, *HIDDEN[: len(hidden) or 2]]}
    met = Counter[frozenset[PeerId]]()
    for _ in range(rounds):
        for member in dice.sample(list(members.values()), len(members)):
            look(member, members, hidden)
        met.update({frozenset([peer, other]) for peer, one in members.items() if (other := partner(one))})
        for member in members.values():
            next_round(member)
    return met


def test_of_three_replicas_the_two_hidden_ones_are_the_pair_less_often() -> None:
    both = frozenset(HIDDEN[:2])
    as_others, less = (pairs(hidden, 1_500, 1) for hidden in ([], HIDDEN[:2]))
    assert as_others[both] / as_others.total() > 0.28
    assert 0.15 < less[both] / less.total() < 0.26
    assert less.total() > 0.95 * as_others.total(), "nobody is alone for that"


@pytest.mark.parametrize("seed", range(10))
def test_every_two_of_three_replicas_meet_within_twenty_rounds(seed: int) -> None:
    assert len(pairs(HIDDEN[:2], 20, seed)) == 3


def test_every_two_of_five_meet_where_four_are_hidden() -> None:
    met = pairs(HIDDEN, 400, 1)
    assert len(met) == 10
    assert min(met.values()) > 0.4 * met.total() / 10
