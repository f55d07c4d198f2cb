"""The pace of rounds: k steps each, or as long as the median replica needs for k."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.rounds.meeting import Bounds
from node.rounds.pace import Tempo, steps_of_round

K = 20


def test_with_the_pace_steps_a_round_is_k_steps_whatever_the_speeds() -> None:
    assert steps_of_round("steps", K, 100.0, [1.0, 2.0]) == K


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 10), (2.0, 20), (3.0, 30), (4.0, 40)])
def test_with_the_pace_time_a_round_is_what_fits_into_the_median_replicas_time(
    rate: float, steps: int
) -> None:
    speeds = [1.0, 2.0, 2.0, 3.0, 4.0]
    speeds.remove(rate)
    assert steps_of_round("time", K, rate, speeds) == steps


def test_rounds_of_all_speeds_then_take_the_same_time() -> None:
    speeds = [1.0, 1.7, 2.0, 3.1, 4.0]
    times = [steps_of_round("time", K, s, [o for o in speeds if o is not s]) / s for s in speeds]
    assert max(times) / min(times) < 1.1


@pytest.mark.parametrize(("rate", "steps"), [(100.0, 4 * K), (0.01, K // 4)])
def test_the_number_of_steps_stays_between_a_quarter_of_k_and_4_k(rate: float, steps: int) -> None:
    assert steps_of_round("time", K, rate, [1.0, 1.0]) == steps


def test_as_long_as_speeds_are_not_known_a_round_is_k_steps() -> None:
    assert steps_of_round("time", K, 0.0, [1.0, 2.0]) == K
    assert steps_of_round("time", K, 1.0, []) == K
    assert steps_of_round("time", K, 1.0, [0.0, -3.0]) == K


def test_a_few_replicas_that_announce_nonsense_change_little() -> None:
    assert steps_of_round("time", K, 1.0, [1.0, 1.0, 1.0, 1e300, 5e-324]) == K


@given(k=st.integers(1, 1000), own=st.floats(-1, 1e308), rates=st.lists(st.floats(-1, 1e308)))
def test_whatever_is_announced_the_number_is_within_its_bounds(
    k: int, own: float, rates: list[float]
) -> None:
    steps = steps_of_round("time", k, own, rates)
    assert max(1, math.floor(k / 4)) <= steps <= 4 * k


def test_the_time_of_a_step_is_the_mean_of_the_last_ones_and_a_stall_counts_little() -> None:
    tempo = Tempo(0.0)
    for seconds in (60.0, 1.0, 1.0, 2.0):  # the first one waited for others
        tempo.step_done(seconds, 100.0)
    here = tempo.progress(100.5, 4)
    assert (here.steps, here.step_seconds, here.into_step) == (4, 2.5, 0.5)
    for seconds in (0.5, 1.5) * 8:
        tempo.step_done(seconds, 100.0)
    assert tempo.progress(100.5, 4).step_seconds == 1.0


def test_the_pause_between_rounds_is_measured_and_is_no_part_of_a_step() -> None:
    tempo = Tempo(0.0)
    assert tempo.pause == 0.0
    tempo.step_done(1.0, 10.0)
    tempo.round_ended(10.0)
    tempo.round_began(13.0)
    assert tempo.pause == 3.0
    assert tempo.progress(13.5, 0).into_step == 0.5


def test_a_step_that_takes_longer_than_the_window_says_nothing() -> None:
    bounds = Bounds.of(K, 0.25)
    tempo = Tempo(0.0)
    assert tempo.is_stalled(0.0, bounds)  # nothing is known yet
    tempo.step_done(1.0, 10.0)
    assert not tempo.is_stalled(15.0, bounds)
    assert tempo.is_stalled(15.1, bounds)
