"""Deadlines follow what peers show, and never exceed the manifest's limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.links.links import ANSWERS, ENOUGH_ANSWERS, AdaptiveDeadline

LIMIT, LEAST = 30.0, 0.5


def after(*seconds: float) -> AdaptiveDeadline:
    deadline = AdaptiveDeadline(LIMIT, LEAST)
    for duration in seconds:
        deadline.note(duration)
    return deadline


def test_the_manifests_limit_holds_until_there_is_experience() -> None:
    assert after().seconds() == LIMIT
    assert after(*[0.1] * (ENOUGH_ANSWERS - 1)).seconds() == LIMIT
    assert after(*[0.1] * ENOUGH_ANSWERS).seconds() < LIMIT


def test_a_steady_network_gets_three_times_what_it_takes() -> None:
    assert after(*[1.0] * 10).seconds() == pytest.approx(3.0)


def test_an_erratic_network_gets_more_time_than_a_steady_one_of_the_same_median() -> None:
    assert after(*[0.5, 1.0, 1.5] * 5).seconds() > after(*[1.0] * 15).seconds() + 1


def test_what_is_known_to_pass_first_is_waited_for_besides() -> None:
    assert after(*[1.0] * 10).seconds(more=7.0) == pytest.approx(10.0)
    assert after().seconds(more=7.0) == LIMIT + 7.0


def test_one_outlier_changes_little() -> None:
    assert after(*[1.0] * 15, 29.0).seconds() < 2 * after(*[1.0] * 15).seconds()


@given(durations=st.lists(st.floats(0, 1e9), max_size=60), misses=st.integers(0, 50))
def test_it_stays_within_its_bounds(durations: list[float], misses: int) -> None:
    deadline = after(*durations)
    for _ in range(misses):
        deadline.note_missed()
    assert LEAST <= deadline.seconds() <= LIMIT


def test_misses_make_it_grow_until_the_limit_when_the_network_slows_down() -> None:
    deadline = after(*[0.2] * ANSWERS)
    before = deadline.seconds()
    for _ in range(ANSWERS):
        deadline.note_missed()
    assert deadline.seconds() > before
    for _ in range(4 * ANSWERS):
        deadline.note_missed()
    assert deadline.seconds() == LIMIT


def test_it_comes_down_again_when_the_network_recovers() -> None:
    deadline = after(*[20.0] * ANSWERS)
    assert deadline.seconds() == LIMIT
    for _ in range(ANSWERS):
        deadline.note(0.2)
    assert deadline.seconds() == pytest.approx(0.6)
