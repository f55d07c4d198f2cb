"""The fraction of time spent computing: exact since the start, within a mark's length over the last minute."""

from __future__ import annotations

import random

import pytest

from node.watch.counting import WINDOW_SECONDS, Busy


class Clock:
    def __init__(self) -> None:
        self.time = 1_000.0

    def __call__(self) -> float:
        return self.time


def work(busy: Busy, clock: Clock, seconds: float, idle: float) -> None:
    busy.begin()
    clock.time += seconds
    busy.end()
    clock.time += idle


def test_before_any_time_has_passed_it_is_zero() -> None:
    busy = Busy(Clock())
    assert (busy.fraction(), busy.recent_fraction()) == (0.0, 0.0)


@pytest.mark.parametrize("job", [0.001, 0.3, 20.0])
def test_a_steady_load(job: float) -> None:
    clock = Clock()
    busy = Busy(clock)
    while clock.time < 1_200:
        work(busy, clock, job, job)
    assert busy.fraction() == pytest.approx(0.5, abs=job / 200)
    assert busy.recent_fraction() == pytest.approx(0.5, abs=(job + 1) / WINDOW_SECONDS)


def test_work_that_goes_on_counts() -> None:
    clock = Clock()
    busy = Busy(clock)
    clock.time += 10
    busy.begin()
    clock.time += 30
    assert busy.fraction() == pytest.approx(0.75)
    clock.time += 100
    assert busy.recent_fraction() == pytest.approx(1.0)


def test_the_last_minute_forgets_what_was_before() -> None:
    clock = Clock()
    busy = Busy(clock)
    for _ in range(1_000):
        work(busy, clock, 0.1, 0.0)
    clock.time += WINDOW_SECONDS + 1
    assert busy.recent_fraction() == pytest.approx(0.0, abs=1 / WINDOW_SECONDS)
    work(busy, clock, 15.0, 0.0)
    assert busy.recent_fraction() == pytest.approx(0.25, abs=1 / WINDOW_SECONDS)


def test_any_load_stays_within_bounds_and_in_little_memory() -> None:
    rng, clock = random.Random(0), Clock()
    busy = Busy(clock)
    for _ in range(20_000):
        work(busy, clock, rng.expovariate(20), rng.expovariate(10))
        assert 0 <= busy.recent_fraction() <= 1
    assert busy.fraction() == pytest.approx(1 / 3, abs=0.02)
    assert busy.marks <= WINDOW_SECONDS + 3
