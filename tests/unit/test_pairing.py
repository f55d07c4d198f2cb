"""Pairing: whatever is proposed, lost or refused, two replicas agree on one pair or on none."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from node.rounds.pairing import Pairing
from protocol.ground import PeerId
from tests.unit.pairings import (
    ANY_TIME,
    CROWD,
    A,
    B,
    C,
    D,
    K,
    agreed,
    answer,
    at,
    deliver,
    next_round,
    pairing,
    partner,
    propose,
)


def test_it_says_in_a_line_whom_it_meets_and_whom_it_asks() -> None:
    a, b = pairing(A), pairing(B)
    proposal = propose(a, B)
    assert repr(a) == "<Pairing of …a: this round with nobody, the next with nobody, asks …b>"
    answer(proposal, a, deliver(proposal, a, b))
    a.end_round(at(K))
    assert repr(a) == "<Pairing of …a: this round, at its end, with …b, the next with nobody>"


# --- finding a partner -----------------------------------------------------------------------------


def test_a_proposal_to_a_free_replica_makes_a_pair_that_both_know() -> None:
    a, b = pairing(A), pairing(B)
    pair = agreed(a, b)
    assert a.holds(pair)
    assert b.holds(Pair(A, pair.name))
    assert (partner(a), partner(b)) == (B, A)


@pytest.mark.parametrize("order", ["a is asked first", "b is asked first", "a is asked last of all"])
def test_of_two_crossing_proposals_one_counts_whatever_comes_first(order: str) -> None:
    a, b = pairing(A), pairing(B)
    from_a, from_b = propose(a, B), propose(b, A)
    if order == "a is asked first":
        to_b, to_a = deliver(from_b, b, a), deliver(from_a, a, b)
        answer(from_a, a, to_a)
    elif order == "b is asked first":
        to_a, to_b = deliver(from_a, a, b), deliver(from_b, b, a)
        answer(from_a, a, to_a)
    else:
        to_a = deliver(from_a, a, b)
        answer(from_a, a, to_a)
        to_b = deliver(from_b, b, a)
    answer(from_b, b, to_b)
    assert isinstance(to_a, Meeting)  # that of the smaller peer id
    assert isinstance(to_b, Refusal)
    assert a.holds(from_a.pair)
    assert b.holds(Pair(A, from_a.pair.name))


def test_proposals_in_a_ring_end_with_at_most_one_partner_each() -> None:
    a, b, c = ring = [pairing(A), pairing(B), pairing(C)]
    sent = [propose(a, B), propose(b, C), propose(c, A)]
    answers = [deliver(sent[0], a, b), deliver(sent[1], b, c), deliver(sent[2], c, a)]
    assert answers == [Refusal("busy")] * 3  # nobody waits for anybody
    for member, proposal in zip(ring, sent, strict=True):
        answer(proposal, member, Refusal("busy"))
        assert propose(member, proposal.pair.partner)  # it may be asked again at once


def test_one_that_several_have_refused_takes_whoever_asks_and_gives_its_own_proposal_up() -> None:
    a, c = pairing(A), pairing(C)
    p, q, r, s, t, u = (PeerId(name) for name in "pqrstu")
    for asked, partner_ in ((p, q), (r, s), (t, u)):
        ours = propose(a, asked)
        assert deliver(propose(pairing(D), A), pairing(D), a) == Refusal("busy")
        answer(ours, a, Refusal("engaged", partner_))
    late, later = (propose(a, *CROWD, B) for _ in range(2))
    offer = propose(c, A)
    assert answer(offer, c, deliver(offer, c, a))
    assert (partner(a), partner(c)) == (C, A)
    for proposal in (late, later):
        accepted = deliver(proposal, a, pairing(proposal.pair.partner))
        assert isinstance(accepted, Meeting)
        assert not answer(proposal, a, accepted), "the other must be told"
    assert partner(a) == C


def test_an_engaged_replica_names_its_partner_and_neither_is_asked_again_for_this_round() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    agreed(a, b)
    proposal = propose(c, B)
    refusal = deliver(proposal, c, b)
    assert refusal == Refusal("engaged", A)
    answer(proposal, c, refusal)
    assert propose(c, A, B, D).pair.partner == D


def test_a_lost_answer_leaves_the_proposer_free_for_another() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    lost = propose(a, B)
    assert isinstance(deliver(lost, a, b), Meeting)  # b agreed, a never hears it
    answer(lost, a, Refusal("lost"))
    assert partner(a) is None
    agreed(a, c)
    assert b.drop(Pair(A, lost.pair.name))  # a tells it
    assert partner(b) is None


def test_a_repeated_proposal_gets_the_same_answer() -> None:
    a, b = pairing(A), pairing(B)
    proposal = propose(a, B)
    first, again = deliver(proposal, a, b), deliver(proposal, a, b)
    assert first == again
    assert answer(proposal, a, again)
    assert len(b.agreements) == 1


def test_a_late_answer_to_an_old_proposal_changes_nothing() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    old = propose(a, B)
    late = deliver(old, a, b)
    answer(old, a, Refusal("lost"))
    pair = agreed(a, c)
    answer(old, a, Refusal("engaged"))
    assert not answer(old, a, late)  # b must be told that nothing came of it
    assert a.current is not None
    assert a.current.pair == pair


def test_who_is_out_of_step_is_asked_again_later_in_the_round() -> None:
    a = pairing(A)
    answer(propose(a, B), a, Refusal("out-of-step"))
    assert a.propose([B], at(4)) is not None  # for the next round
    a = pairing(A)
    answer(propose(a, B), a, Refusal("out-of-step"))
    assert propose(a, B, steps=5).mine.opens_in == 10.0  # for this one


def test_one_does_not_propose_to_oneself_nor_twice_at_a_time_to_few() -> None:
    a = pairing(A)
    assert a.propose([A], at(0)) is None
    propose(a, B)
    assert a.propose([C], at(0)) is None
    assert a.propose([A, B, C, *CROWD[4:]], at(0)) is None


def test_candidates_are_equally_likely() -> None:
    peers, draws = [PeerId(f"p{n}") for n in range(5)], 10_000
    a, counts = pairing(A), Counter[PeerId]()
    for _ in range(draws):
        proposal = propose(a, *peers)
        counts[proposal.pair.partner] += 1
        answer(proposal, a, Refusal("busy"))
    expected = draws / len(peers)
    assert sum((counts[peer] - expected) ** 2 / expected for peer in peers) < 18.5  # 0.1 %, 4 degrees


@given(seed=st.integers(0, 1000))
def test_looking_for_a_partner_begins_in_the_first_half_of_the_round(seed: int) -> None:
    a, b = pairing(A, seed=seed), pairing(B, seed=seed + 1)
    agreed(a, b)
    next_round(a)
    assert 0.0 <= a.seeks_in(at(0)) <= K / 2


def test_who_was_alone_looks_for_a_partner_at_once() -> None:
    a = pairing(A)
    next_round(a)
    assert a.seeks_in(at(0)) == 0.0


# --- this round and the next -----------------------------------------------------------------------


def test_one_that_is_still_in_its_last_round_accepts_for_the_next_one() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    agreed(b, c)
    proposal = propose(a, B)  # a has just begun, b is one step from its end
    assert answer(proposal, a, deliver(proposal, a, b, steps=19))
    assert (partner(a), partner(b)) == (B, C)
    next_round(b, now=20.0)
    assert partner(b) == A


def test_one_that_everybody_refused_proposes_for_its_next_round() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    agreed(b, c)
    refused = propose(a, B, C, steps=8)
    answer(refused, a, deliver(refused, a, {B: b, C: c}[refused.pair.partner], steps=8), steps=8)
    proposal = propose(a, B, C, steps=8)
    assert proposal.mine.due_in == 12 + K
    chosen = {B: b, C: c}[proposal.pair.partner]
    assert answer(proposal, a, deliver(proposal, a, chosen, steps=8), steps=8)
    assert partner(a) is None
    next_round(a, now=20.0)
    next_round(chosen, now=20.0)
    assert (partner(a), partner(chosen)) == (chosen.me, A)


def test_a_replica_takes_part_in_one_pair_for_each_of_the_two_rounds() -> None:
    a, others = pairing(A), [pairing(PeerId(f"p{n}")) for n in range(4)]
    answers = [a.on_proposal(Pair(o.me, f"now {o.me}"), o.bounds.meeting(at(0)), at(0)) for o in others]
    assert [isinstance(reply, Meeting) for reply in answers] == [True, False, False, False]
    later = Meeting(35.0, 40.0, 45.0, 1.0)
    answers = [a.on_proposal(Pair(o.me, f"next {o.me}"), later, at(0)) for o in others]
    assert [isinstance(reply, Meeting) for reply in answers] == [True, False, False, False]
    assert len(a.agreements) == 2


def test_rounds_that_cannot_end_together_are_out_of_step() -> None:
    b = pairing(B)
    # b has done 5 steps of 1 s: it ends this round in 10 to 20 s and the next one in 15 + 15 to 15 + 25 s
    for number, nonsense in enumerate([Meeting(22, 24, 28, 1), Meeting(0, 2, 8, 1), Meeting(50, 60, 70, 1)]):
        assert b.on_proposal(Pair(A, f"p{number}"), nonsense, at(5)) == Refusal("out-of-step")
    assert not b.agreements
    assert isinstance(b.on_proposal(Pair(A, "p"), Meeting(19, 20, 30, 1), at(5)), Meeting)


@pytest.mark.parametrize("far", [Meeting(9e6, 9e6, 9e6, 1.0), Meeting(5.0, 4.0, 3.0, 1.0)])
def test_a_proposal_for_the_far_future_or_no_time_at_all_takes_no_place(far: Meeting) -> None:
    b = pairing(B)
    assert b.on_proposal(Pair(A, "p"), far, at(5)) == Refusal("out-of-step")
    assert not b.agreements


def test_an_answer_that_makes_no_sense_makes_no_pair() -> None:
    for nonsense in (Meeting(9e6, 9e6, 9e6, 1.0), Meeting(5.0, 4.0, 3.0, 1.0)):
        a = pairing(A)
        assert not answer(propose(a, B), a, nonsense)
        assert not a.agreements
        assert propose(a, B, C).pair.partner == C


def test_at_the_end_of_a_round_only_the_next_one_is_agreed_on() -> None:
    a, b = pairing(A), pairing(B)
    a.end_round(at(20))
    assert isinstance(a.on_proposal(Pair(B, "p"), b.bounds.meeting(at(0)), at(20)), Meeting)
    assert partner(a) is None
    a.begin_round(K)
    assert partner(a) == B


def test_a_proposal_without_an_answer_at_the_end_of_the_round_is_given_up() -> None:
    a, b = pairing(A), pairing(B)
    proposal = propose(a, B)
    reply = deliver(proposal, a, b)
    next_round(a, now=20.0)
    assert not answer(proposal, a, reply)  # b must be told
    assert propose(a, B)


def test_a_proposal_for_the_next_round_is_good_for_it_also_when_that_has_begun() -> None:
    a, b = pairing(A), pairing(B)
    for peer in (B, C):
        answer(propose(a, peer), a, Refusal("engaged"))
    proposal = propose(a, B, C, steps=19)
    next_round(a, now=20.0)
    assert answer(proposal, a, ANY_TIME)
    assert partner(a) == proposal.pair.partner
    assert not b.agreements


# --- who is left over ------------------------------------------------------------------------------


def left_over() -> tuple[Pairing, Pairing, Pairing]:
    """One that is alone and has found a partner for its next round, that partner, and the third of them."""
    a, b, c = pairing(A), pairing(B), pairing(C)
    agreed(b, c)
    while not a.agreements:
        proposal = propose(a, B, C, steps=8)
        chosen = {B: b, C: c}[proposal.pair.partner]
        answer(proposal, a, deliver(proposal, a, chosen, steps=8), steps=8)
    return a, chosen, c if chosen is b else b


def test_the_one_that_is_alone_asks_another_to_be_so_in_the_next_round() -> None:
    a, _, third = left_over()
    assert a.propose([B, C], at(8)) is None
    successor = a.successor(at(8))
    assert successor is not None
    assert successor[0] == third.me
    assert third.on_sit_out(successor[1], at(8))
    assert a.successor(at(8)) is None  # one is enough


def test_who_sits_out_refuses_until_the_others_have_found_each_other_and_then_looks_for_a_partner() -> None:
    a, d = pairing(A), pairing(D)
    agreed(a, pairing(B))
    assert a.on_sit_out(Meeting(35.0, 40.0, 45.0, 1.0), at(0))
    next_round(a, now=20.0)
    early = propose(d, A)
    assert deliver(early, d, a) == Refusal("engaged")
    assert a.propose([D], at(11)) is None
    assert a.seeks_in(at(0)) == 0.6 * K
    last = propose(a, D, steps=12)
    assert last.mine.due_in == 8 + K  # nobody is expected to be free in this round
    answer(last, a, Refusal("engaged"), steps=12)
    assert propose(a, D, steps=12).mine.due_in == 8  # but perhaps somebody is


def test_nobody_sits_out_two_rounds_in_a_row_nor_one_that_it_has_a_partner_for() -> None:
    now, later = Meeting(15.0, 20.0, 25.0, 1.0), Meeting(35.0, 40.0, 45.0, 1.0)
    alone = pairing(A)
    assert not alone.on_sit_out(later, at(0))
    next_round(alone)
    assert not alone.on_sit_out(now, at(0))
    engaged = pairing(B)
    agreed(engaged, pairing(C))
    assert not engaged.on_sit_out(now, at(0))
    assert not engaged.on_sit_out(Meeting(9e6, 9e6, 9e6, 1.0), at(0))
    assert engaged.on_sit_out(later, at(0))


# --- any order of events ---------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), count=st.integers(2, 6), loss=st.sampled_from([0.0, 0.1, 0.5]))
def test_agreement_is_mutual_unless_an_answer_was_lost_whatever_the_order_of_messages(
    seed: int, count: int, loss: float
) -> None:
    """Messages of several replicas in random order, some answers lost, some replicas already in the next round."""
    rng = random.Random(seed)
    members = {PeerId(f"p{n}"): pairing(PeerId(f"p{n}"), seed=seed + n) for n in range(count)}
    steps = {peer: rng.choice([0, 1, 19]) for peer in members}
    on_the_way: list[tuple[Pairing, Proposal, Meeting | Refusal | None]] = []
    lost: set[str] = set()
    for _ in range(80):
        if rng.random() < 0.5:
            proposer = rng.choice(list(members.values()))
            proposal = proposer.propose(list(members), at(steps[proposer.me]))
            if proposal is not None:
                on_the_way.append((proposer, proposal, None))
        elif on_the_way:
            proposer, proposal, reply = on_the_way.pop(rng.randrange(len(on_the_way)))
            other = members[proposal.pair.partner]
            if reply is not None:
                if not answer(proposal, proposer, reply, steps[proposer.me]):
                    other.drop(Pair(proposer.me, proposal.pair.name))
                continue
            reply = deliver(proposal, proposer, other, steps[other.me])
            if rng.random() < loss:
                lost.add(proposal.pair.name)
                reply = Refusal("lost")
            on_the_way.append((proposer, proposal, reply))
    waiting = {proposal.pair.name for _, proposal, _ in on_the_way}
    for me, member in members.items():
        assert len(member.agreements) <= 2
        for agreement in member.agreements:
            other, name = members[agreement.pair.partner], agreement.pair.name
            assert other.holds(Pair(me, name)) or name in lost | waiting
