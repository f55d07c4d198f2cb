"""When two rounds can end together: between two inner steps of the slower one, within both windows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.rounds.meeting import (
    LONGEST,
    Bounds,
    Meeting,
    Refusal,
    RoundProgress,
)
from protocol.ground import PeerId

K20 = Bounds.of(20, 0.25)


def after(steps: int, step_seconds: float = 1.0, into_step: float = 0.0) -> Meeting:
    """The meeting of a replica that has done so many of its 20 steps."""
    return K20.meeting(RoundProgress(0.0, steps, step_seconds, into_step))


def meetings() -> st.SearchStrategy[Meeting]:
    """What anybody may send, and what makes no sense."""
    seconds = st.floats(0, LONGEST)
    return st.builds(Meeting, seconds, seconds, seconds, seconds)


@given(k=st.integers(1, 200), window=st.floats(0, 0.9))
def test_a_round_may_end_within_the_window_around_k(k: int, window: float) -> None:
    bounds = Bounds.of(k, window)
    assert 1 <= bounds.opens_at <= bounds.nominal == k <= bounds.ends_at
    assert bounds.opens_at == max(1, round(k * (1 - window)))
    assert bounds.ends_at == max(k, round(k * (1 + window)))


def test_a_meeting_is_told_from_the_present_step_on() -> None:
    assert after(5, 2.0, into_step=0.5) == Meeting(19.5, 29.5, 39.5, 2.0)
    assert after(5, 2.0, into_step=9.0) == Meeting(18.0, 28.0, 38.0, 2.0)  # a step that is late ends now
    assert after(30) == Meeting(1.0, 1.0, 1.0, 1.0)  # the round is over at the next end of a step


def test_replicas_in_step_meet_at_k() -> None:
    assert after(5).match(after(5)) == 15.0


def test_one_that_is_ahead_and_one_that_is_behind_meet_half_way() -> None:
    assert after(3).match(after(7)) == 15.0


@pytest.mark.parametrize(("ahead", "meets"), [(10, 15.0), (11, 15.0), (12, None), (19, None)])
def test_beyond_the_windows_they_do_not_meet(ahead: int, meets: float | None) -> None:
    """The first round ends in 15 to 25; one step beyond the other's window is allowed."""
    assert after(0).match(after(ahead)) == meets


def test_they_meet_at_the_end_of_a_step_of_the_slower_one() -> None:
    slow, fast = after(15, 4.0, into_step=1.0), after(5, 1.0)
    assert (slow.opens_in, fast.opens_in, fast.ends_in) == (3.0, 10.0, 20.0)
    # 3, 7, 11, 15 or 19; half way between 15 and 19 is 17
    assert slow.match(fast) == fast.match(slow) == 19.0


def test_without_a_window_replicas_that_are_at_most_a_step_apart_meet() -> None:
    exact = Bounds.of(20, 0.0)
    now, ahead, further = (exact.meeting(RoundProgress(0.0, steps, 1.0)) for steps in (5, 6, 7))
    assert now.match(ahead) == 15.0
    assert now.match(further) is None


def test_for_a_pair_agreed_on_before_one_may_wait_a_little() -> None:
    assert after(0).match(after(12)) is None
    assert after(0).match(after(12), patience=2.0) == 15.0
    assert after(0).match(after(14), patience=2.0) is None


def test_one_that_waits_meets_any_other_as_soon_as_that_may_end() -> None:
    waiting = Meeting(0.0, 0.0, 60.0, 0.0)
    assert waiting.match(after(5)) == 10.0
    assert waiting.match(waiting) == 0.0


@given(meetings(), meetings())
def test_both_sides_come_to_the_same_whatever_they_tell(one: Meeting, other: Meeting) -> None:
    if not (one.is_possible and other.is_possible):
        return
    meets_in = one.match(other)
    assert meets_in == other.match(one) or one.step_seconds == other.step_seconds
    if meets_in is None:
        return
    slow, fast = sorted((one, other), key=lambda meeting: -meeting.step_seconds)
    room = 1e-6 * (1 + slow.step_seconds + abs(meets_in))
    assert slow.opens_in - room <= meets_in <= slow.ends_in + room
    assert fast.opens_in - fast.step_seconds - room <= meets_in <= fast.ends_in + fast.step_seconds + room


@pytest.mark.parametrize(
    "nonsense",
    [
        Meeting(5.0, 4.0, 6.0, 1.0),
        Meeting(5.0, 7.0, 6.0, 1.0),
        Meeting(-1.0, 4.0, 6.0, 1.0),
        Meeting(1.0, 4.0, 1e300, 1.0),
        Meeting(math.nan, 4.0, 6.0, 1.0),
        Meeting(1.0, 4.0, math.inf, 1.0),
    ],
)
def test_nonsense_is_recognised(nonsense: Meeting) -> None:
    assert not nonsense.is_possible


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal("engaged"),
        Refusal("engaged", PeerId("a")),
        Refusal("engaged", PeerId("a"), PeerId("b")),
        Refusal("busy"),
    ],
)
def test_a_refusal_is_the_same_on_the_other_side(refusal: Refusal) -> None:
    assert Refusal.told(refusal.code, refusal.reason) == refusal


def test_more_names_than_there_are_do_no_harm() -> None:
    assert Refusal.told("engaged", "a b c d") == Refusal("engaged", PeerId("a"), PeerId("b"))
    assert Refusal.told("unwanted", "many replicas of one network") == Refusal("unwanted")
