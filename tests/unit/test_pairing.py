"""Pairing: whatever is proposed, lost or refused, two replicas agree on one pair or end their rounds alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.pairing import Meeting, Pair, Pairing, Phase
from protocol.transport.base import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ALWAYS = Meeting(0.0, 1e9)
K = 20


def pairing(me: PeerId = A, k: int = K, window: float = 0.25, seed: int = 1) -> Pairing:
    return Pairing(me, k, window, random.Random(seed))


def deliver(pair: Pair, proposer: Pairing, to: Pairing, steps: int = 0) -> str | None:
    """The proposal of `proposer` arrives; returns the refusal, None for yes."""
    return to.on_proposal(Pair(proposer.me, pair.name), ALWAYS, steps, 1.0)


def propose(proposer: Pairing, *candidates: PeerId) -> Pair:
    pair = proposer.propose(candidates)
    assert pair is not None
    return pair


def agreed(a: Pairing, b: Pairing) -> Pair:
    pair = propose(a, b.me)
    a.answered(pair, deliver(pair, a, b))
    return pair


# --- finding a partner --------------------------------------------------------------------------


def test_a_proposal_to_a_free_replica_makes_a_pair_that_both_know() -> None:
    a, b = pairing(A), pairing(B)
    pair = agreed(a, b)
    assert (a.phase, b.phase) == (Phase.AGREED, Phase.AGREED)
    assert a.pair == Pair(B, pair.name)
    assert b.pair == Pair(A, pair.name)


@pytest.mark.parametrize("order", ["ab answers late", "ba answers late"])
def test_of_two_crossing_proposals_one_counts_whatever_comes_first(order: str) -> None:
    a, b = pairing(A), pairing(B)
    from_a, from_b = propose(a, B), propose(b, A)
    if order == "ab answers late":
        answer_to_a, answer_to_b = deliver(from_a, a, b), deliver(from_b, b, a)
        a.answered(from_a, answer_to_a)
        b.answered(from_b, answer_to_b)
    else:
        answer_to_b, answer_to_a = deliver(from_b, b, a), deliver(from_a, a, b)
        b.answered(from_b, answer_to_b)
        a.answered(from_a, answer_to_a)
    assert (answer_to_a, answer_to_b) == (None, "busy")  # that of the smaller peer id
    assert a.pair == Pair(B, from_a.name)
    assert b.pair == Pair(A, from_a.name)
    assert (a.phase, b.phase) == (Phase.AGREED, Phase.AGREED)


def test_proposals_in_a_ring_end_with_at_most_one_partner_each() -> None:
    a, b, c = ring = [pairing(A), pairing(B), pairing(C)]
    sent = [propose(a, B), propose(b, C), propose(c, A)]
    answers = [deliver(sent[0], a, b), deliver(sent[1], b, c), deliver(sent[2], c, a)]
    assert answers == ["busy"] * 3  # nobody waits for anybody
    for member, pair in zip(ring, sent, strict=True):
        member.answered(pair, "busy")
        assert member.phase is Phase.FREE
        assert member.propose([pair.partner]) is not None  # it may be asked again at once


def test_an_engaged_replica_refuses_and_is_not_asked_again_in_this_round() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    agreed(a, b)
    pair = propose(c, B)
    refusal = deliver(pair, c, b)
    assert refusal == "engaged"
    c.answered(pair, refusal)
    assert c.propose([B]) is None
    assert propose(c, A, B).partner == A


def test_a_lost_answer_leaves_the_proposer_free_for_another() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    lost = propose(a, B)
    assert deliver(lost, a, b) is None  # b agreed, a never hears it
    a.answered(lost, "lost")
    assert a.phase is Phase.FREE
    assert a.propose([B]) is None
    agreed(a, c)
    assert not a.on_ready(lost.name)  # b learns that it is alone
    assert a.pair is not None
    assert a.pair.partner == C


def test_a_late_answer_to_an_old_proposal_changes_nothing() -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    old = propose(a, B)
    a.answered(old, "lost")
    pair = agreed(a, c)
    a.answered(old, "engaged")
    a.answered(old, None)
    assert a.pair == pair
    assert b.phase is Phase.FREE


def test_rounds_that_cannot_end_together_are_out_of_step() -> None:
    b = pairing(B)
    # b: 15 of 20 steps are the earliest, 25 the latest; it has done 5 at 1 s each
    far = [Meeting(25.0, 30.0), Meeting(0.0, 5.0)]
    for number, meeting in enumerate(far):
        assert b.on_proposal(Pair(A, f"p{number}"), meeting, 5, 1.0) == "out-of-step"
    assert b.phase is Phase.FREE
    assert b.on_proposal(Pair(A, "p"), Meeting(19.0, 30.0), 5, 1.0) is None


def test_forgotten_refusals_may_be_asked_again() -> None:
    a = pairing(A)
    a.answered(propose(a, B), "engaged")
    assert a.propose([B]) is None
    a.forget_refusals()
    assert a.propose([B]) is not None


def test_one_does_not_propose_to_oneself_nor_twice_at_a_time() -> None:
    a = pairing(A)
    assert a.propose([A]) is None
    propose(a, B)
    assert a.propose([C]) is None


def test_candidates_are_equally_likely() -> None:
    a, peers, draws = pairing(A), [PeerId(f"p{n}") for n in range(5)], 10_000
    counts: Counter[PeerId] = Counter()
    for _ in range(draws):
        counts[propose(a, *peers).partner] += 1
        a.begin_round()
    expected = draws / len(peers)
    assert sum((counts[peer] - expected) ** 2 / expected for peer in peers) < 18.5  # 0.1 %, 4 degrees


def test_each_round_begins_anew() -> None:
    a, b = pairing(A), pairing(B)
    old = agreed(a, b)
    assert a.on_ready(old.name)
    a.begin_round()
    assert (a.phase, a.pair, a.partner_ready) == (Phase.FREE, None, False)
    assert not a.on_ready(old.name)


# --- ending the round ---------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), k=st.integers(1, 100), window=st.floats(0, 0.9))
def test_a_replica_with_nobody_ends_its_round_alone_within_the_window(
    seed: int, k: int, window: float
) -> None:
    a = pairing(A, k, window, seed)
    end = next(steps for steps in range(1, 3 * k + 2) if a.must_end(steps))
    assert a.opens_at <= end <= a.ends_at
    assert max(1, round(k * (1 - window))) == a.opens_at
    assert max(k, round(k * (1 + window))) == a.ends_at
    if window == 0:
        assert end == k


def test_a_pair_waits_for_the_slower_one_but_not_beyond_the_window() -> None:
    a, b = pairing(A), pairing(B)
    agreed(a, b)
    assert not a.must_end(K)
    assert not a.must_end(24)
    assert a.must_end(25)


def test_a_pair_ends_together_when_both_may() -> None:
    a, b = pairing(A), pairing(B)
    pair = agreed(a, b)
    assert not a.is_ready(K - 1)
    assert a.is_ready(K)  # a tells b
    assert b.on_ready(pair.name)
    assert not b.is_ready(14)
    assert not b.must_end(14)
    assert b.is_ready(15)  # the one behind may end early
    assert b.must_end(15)
    assert a.on_ready(pair.name)
    assert a.must_end(K)


def test_without_a_window_all_rounds_have_k_steps() -> None:
    a, b = pairing(A, window=0.0), pairing(B, window=0.0)
    pair = agreed(a, b)
    assert not a.must_end(K - 1)
    assert a.must_end(K)
    b.on_ready(pair.name)
    assert not b.must_end(K - 1)
    assert b.must_end(K)


def test_a_round_of_one_step_still_finds_partners() -> None:
    a, b = pairing(A, k=1), pairing(B, k=1)
    assert not a.may_propose(0)
    assert a.may_propose(1)
    agreed(a, b)
    assert a.must_end(1)


@given(seed=st.integers(0, 1000))
def test_looking_for_a_partner_begins_in_the_first_half_of_the_round(seed: int) -> None:
    a = pairing(seed=seed)
    first = next(steps for steps in range(K) if a.may_propose(steps))
    assert 1 <= first <= K // 2


def test_one_that_is_not_free_does_not_look_for_a_partner() -> None:
    a, b = pairing(A), pairing(B)
    agreed(a, b)
    assert not a.may_propose(K)


# --- any order of events ------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), count=st.integers(2, 6), loss=st.sampled_from([0.0, 0.1, 0.5]))
def test_nobody_ever_has_two_partners_and_agreement_is_mutual_unless_an_answer_was_lost(
    seed: int, count: int, loss: float
) -> None:
    """Messages of several replicas in random order, some answers lost."""
    rng = random.Random(seed)
    members = {PeerId(f"p{n}"): pairing(PeerId(f"p{n}"), seed=seed + n) for n in range(count)}
    on_the_way: list[tuple[str, PeerId, Pair, str | None]] = []
    lost_between: set[frozenset[PeerId]] = set()
    for _ in range(60):
        free = [m for m in members.values() if m.phase is Phase.FREE]
        if free and rng.random() < 0.5:
            proposer = rng.choice(free)
            pair = proposer.propose(list(members))
            if pair is not None:
                on_the_way.append(("proposal", proposer.me, pair, None))
        elif on_the_way:
            kind, proposer_id, pair, answer = on_the_way.pop(rng.randrange(len(on_the_way)))
            proposer = members[proposer_id]
            if kind == "proposal":
                refusal = deliver(pair, proposer, members[pair.partner])
                lost = rng.random() < loss
                if lost and refusal is None:
                    lost_between.add(frozenset({proposer_id, pair.partner}))
                on_the_way.append(("answer", proposer_id, pair, "lost" if lost else refusal))
            else:
                proposer.answered(pair, answer)
    for kind, proposer_id, pair, answer in on_the_way:
        if kind == "answer":
            members[proposer_id].answered(pair, answer)
    for me, member in members.items():
        if member.phase is Phase.AGREED:
            assert member.pair is not None
            other = members[member.pair.partner]
            mutual = other.pair == Pair(me, member.pair.name)
            assert mutual or frozenset({me, other.me}) in lost_between
