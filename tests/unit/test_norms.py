"""Gradients out of all proportion are recognised, and a scale that has changed for good is accepted in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.pipeline.conduct import ENOUGH, HISTORY, PROPORTION, TOO_SLOW, Lag, Norms
from node.pipeline.draws import LONGEST_PAUSE, TOLD_SECONDS, Dropped


def after(*values: float) -> Norms:
    norms = Norms()
    for value in values:
        norms.is_outlying(value)
    return norms


def test_a_thousand_times_the_usual_norm_is_outlying_and_a_hundred_times_is_not() -> None:
    assert after(*[0.1] * ENOUGH).is_outlying(1.01 * 0.1 * PROPORTION)
    assert not after(*[0.1] * ENOUGH).is_outlying(0.1 * PROPORTION / 10)


def test_nothing_is_judged_by_too_few_or_by_zeros() -> None:
    assert not after(*[0.1] * (ENOUGH - 1)).is_outlying(1e30)
    assert not after(*[0.0] * HISTORY).is_outlying(1.0)


@given(st.lists(st.floats(1e4, 1e30), max_size=HISTORY // 2 - 1))
def test_less_than_half_of_lies_change_nothing(lies: list[float]) -> None:
    norms = after(*[1.0] * HISTORY, *lies)
    assert norms.is_outlying(1e6)
    assert not norms.is_outlying(2.0)


def test_a_scale_that_has_changed_for_good_is_accepted_after_half_a_history() -> None:
    norms = after(*[1e-3] * HISTORY)
    judged = [norms.is_outlying(10.0) for _ in range(HISTORY)]
    assert judged[0]
    assert not judged[-1]


def test_drops_in_a_row_are_followed_ever_more_slowly_and_told_once_a_minute() -> None:
    dropped, now, told, pauses = Dropped(), 0.0, 0, []
    while now < 10 * TOLD_SECONDS:
        pauses.append(dropped.note())
        told += dropped.to_tell(now) > 0
        now += pauses[-1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    assert told <= 10
    dropped.went_through()
    assert dropped.note() == pauses[0]


def test_a_stage_is_too_slow_when_it_takes_several_times_as_long_as_the_one_before() -> None:
    assert Lag(here=90.0, stage=45.0, before=2.0).is_too_slow
    assert not Lag(here=90.0, stage=2.0 * TOO_SLOW, before=2.0).is_too_slow
