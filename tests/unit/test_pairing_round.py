"""A pair once it is agreed: whether it holds, and at which inner step both of its rounds end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.rounds.meeting import Meeting, Pair, Refusal
from node.rounds.pairing import Pairing
from tests.unit.pairings import A, B, C, K, agreed, answer, at, deliver, pairing, propose

# --- holding to it ---------------------------------------------------------------------------------


def test_in_the_middle_of_the_round_the_partner_is_asked_whether_the_pair_holds() -> None:
    a, b = pairing(A), pairing(B)
    agreed(a, b)
    assert [steps for steps in range(1, K + 6) if a.must_renew(at(steps), in_doubt=False)] == list(
        range(10, K)
    )
    renewal = a.renewal(at(10))
    assert renewal is not None
    assert answer(renewal, a, deliver(renewal, a, b, steps=8), steps=10)
    assert a.current is not None
    assert a.current.meets_at == 10 + 11  # one has 10 steps to go, the other 12
    assert not a.must_renew(at(11), in_doubt=False)


def test_a_partner_in_doubt_is_asked_at_once_but_not_all_the_time() -> None:
    a, b = pairing(A), pairing(B)
    agreed(a, b)
    assert not a.must_renew(at(1), in_doubt=True)
    assert a.must_renew(at(2), in_doubt=True)
    assert not pairing(C).must_renew(at(2), in_doubt=True)


@pytest.mark.parametrize("code", ["lost", "engaged", "finished", "out-of-step"])
def test_a_pair_that_does_not_hold_any_more_leaves_time_to_find_another(code: str) -> None:
    a, b, c = pairing(A), pairing(B), pairing(C)
    pair = agreed(a, b)
    renewal = a.renewal(at(10))
    assert renewal is not None
    answer(renewal, a, Refusal(code), steps=10)
    assert not a.holds(pair)
    agreed(a, c, steps=10)


def test_asking_for_a_pair_that_the_partner_has_forgotten_makes_it_anew() -> None:
    a, b = pairing(A), pairing(B)
    pair = agreed(a, b)
    restarted = pairing(B, seed=2)
    renewal = a.renewal(at(10))
    assert renewal is not None
    assert answer(renewal, a, deliver(renewal, a, restarted, steps=10), steps=10)
    assert restarted.holds(Pair(A, pair.name))


def test_nobody_else_can_end_or_change_a_pair() -> None:
    a, b = pairing(A), pairing(B)
    pair = agreed(a, b)
    stranger = Pair(C, pair.name)
    assert not a.drop(stranger)
    assert not a.on_ready(stranger)
    assert not a.on_ready(Pair(B, "another name"))
    assert a.on_proposal(stranger, a.bounds.meeting(at(0)), at(0)) == Refusal("engaged", B)
    assert a.holds(pair)


# --- ending the round ------------------------------------------------------------------------------


def ends_at(member: Pairing) -> int:
    return next(steps for steps in range(1, 4 * K) if member.must_end(at(steps)))


@given(seed=st.integers(0, 1000), k=st.integers(1, 100), window=st.floats(0, 0.9))
def test_a_replica_with_nobody_ends_its_round_alone_within_the_window(
    seed: int, k: int, window: float
) -> None:
    a = pairing(A, k, window, seed)
    for _ in range(3):
        a.propose([], at(0))
        end = next(steps for steps in range(1, 3 * k + 2) if a.must_end(at(steps)))
        assert a.bounds.opens_at <= end <= a.bounds.ends_at
        a.begin_round(k)


def test_one_that_is_in_step_but_alone_keeps_the_rhythm_of_the_others() -> None:
    a = pairing(A)
    for _ in range(20):
        answer(propose(a, B), a, Refusal("engaged"))
        a.propose([], at(0))
        assert ends_at(a) == K
        a.begin_round(K)


def test_one_that_still_asks_goes_on_training_but_not_beyond_the_window() -> None:
    a = pairing(A)
    proposal = propose(a, B)
    assert ends_at(a) == a.bounds.ends_at
    answer(proposal, a, Refusal("engaged"))
    a.propose([], at(K))
    assert a.must_end(at(K))


def test_the_replica_with_the_longer_steps_ends_the_round_and_the_other_follows() -> None:
    slow, fast = pairing(B), pairing(A)
    proposal = fast.propose([B], at(0))
    assert proposal is not None
    reply = slow.on_proposal(Pair(A, proposal.pair.name), proposal.mine, at(15, now=0.0, step_seconds=4.0))
    assert isinstance(reply, Meeting)
    assert fast.accepted(proposal, reply, at(0))
    # the slow one ends steps at 4, 8, …; its round should end at 20, the fast one's too
    assert [slow.must_end(at(15 + n, now=4.0 * n, step_seconds=4.0)) for n in (3, 4, 5)] == [
        False,
        False,
        True,
    ]
    assert not fast.must_end(at(K))
    assert fast.on_ready(proposal.pair)
    assert fast.must_end(at(K))


def test_a_partner_that_says_ready_early_is_followed_when_the_round_may_end() -> None:
    a, b = pairing(A), pairing(B)
    pair = agreed(a, b)
    assert a.on_ready(pair)
    assert ends_at(a) == a.bounds.opens_at


def test_one_that_waits_for_the_word_of_its_partner_asks_for_it_in_time_and_ends_without_it() -> None:
    a, b = pairing(A), pairing(B)
    agreed(a, b)
    assert not a.current.paces if a.current else False
    ready = [steps for steps in range(30) if a.is_ready(at(steps))]
    assert ready[0] == a.bounds.ends_at - 1  # the partner ends the step that it is in
    assert ends_at(a) == a.bounds.ends_at


def test_ready_for_a_pair_of_the_next_round_is_remembered() -> None:
    a = pairing(A)
    a.end_round(at(20))
    a.on_proposal(Pair(B, "p"), Meeting(15, 20, 25, 1), at(20))
    assert a.on_ready(Pair(B, "p"))
    a.begin_round(K)
    assert ends_at(a) == a.bounds.opens_at


def test_without_a_window_all_rounds_have_k_steps() -> None:
    a, b = pairing(A, window=0.0), pairing(B, window=0.0)
    pair = agreed(a, b)
    a.on_ready(pair)
    assert (ends_at(a), ends_at(b)) == (K, K)


def test_a_round_of_one_step_still_finds_partners() -> None:
    a, b = pairing(A, k=1), pairing(B, k=1)
    agreed(a, b)
    assert a.must_end(at(1))


def test_the_last_round_of_a_run_can_end_at_any_time() -> None:
    a, b = pairing(A), pairing(B)
    a.at_once = True
    proposal = a.propose([B], at(3))
    assert proposal is not None
    assert proposal.mine == Meeting(0.0, 0.0, 22.0, 0.0)
    assert answer(proposal, a, deliver(proposal, a, b, steps=10), steps=3)
    assert b.current is not None
    assert b.current.paces
    assert ends_at(b) == b.bounds.opens_at
