"""The run's step at a stage of another width than the first: a few steps off at most, whatever one sender reports."""

from __future__ import annotations

import random

import pytest

from node.model.run_clock import AGREED, SEEN, RunClock

TOTAL = 1_000


def fed(each: int, steps: int = 300, lies: int = 0, begin: int = 0) -> tuple[RunClock, int]:
    """Return a clock and its replica's steps after `steps` of the run; one microbatch in four carries `lies`."""
    clock, own, count = RunClock(TOTAL), begin, 0
    for step in range(steps):
        for _ in range(each):
            count += 1
            clock.note(lies if lies and count % 4 == 0 else step, own)
            own += 1
    return clock, own


def test_with_equal_stages_it_is_this_replicas_own_step() -> None:
    clock, own = fed(each=1)
    assert clock.step(own) == own == 300
    assert clock.own_steps_each(own) == 1


@pytest.mark.parametrize("each", [2, 3, 8])
def test_behind_a_wider_stage_it_is_the_first_stages(each: int) -> None:
    clock, own = fed(each)
    assert own == 300 * each
    assert abs(clock.step(own) - 300) <= SEEN / 2
    assert clock.own_steps_each(own) == pytest.approx(each, rel=0.05)


def test_behind_a_narrower_stage_it_is_ahead_of_its_own() -> None:
    clock = RunClock(TOTAL)
    for step in range(0, 900, 3):
        clock.note(step, step // 3)
    assert abs(clock.step(300) - 900) <= 3 * SEEN / 2


@pytest.mark.parametrize("lies", [1, 2**62])
def test_one_sender_of_four_does_not_move_it(lies: int) -> None:
    clock, own = fed(each=2, lies=lies)
    assert abs(clock.step(own) - 300) <= SEEN


@pytest.mark.parametrize("lies", [0, 2**62])
@pytest.mark.parametrize("share", [0.25, 0.4])
def test_a_sender_whose_microbatches_come_in_any_order_leaves_nothing_behind(share: float, lies: int) -> None:
    """By chance it has most of the last ones now and then: that passes, and nothing of it stays."""
    for seed in range(3):
        rng, clock, own = random.Random(seed), RunClock(10_000), 0
        for microbatch in range(16_000):
            own = microbatch // 4
            clock.note(lies if rng.random() < share else own, own)
        for _ in range(SEEN):
            clock.note(own, own)
        assert clock.step(own) == own


def test_a_slow_one_of_the_first_stage_that_trains_on_alone_does_not_set_it_back() -> None:
    clock, own = fed(each=2, steps=TOTAL)
    for step in range(300, 400):
        clock.note(step, own)
        own += 1
    assert clock.step(own) >= TOTAL - AGREED


def test_half_of_what_is_carried_being_lies_leaves_nothing_behind() -> None:
    clock, own = RunClock(TOTAL), 0
    for step in range(100):
        clock.note(step, own)
        clock.note(2**62, own)
        own += 1
    for step in range(100, 100 + SEEN):
        clock.note(step, own)
        own += 1
    assert clock.step(own) <= 100 + 2 * SEEN


def test_all_that_is_carried_stays_within_the_run() -> None:
    clock = RunClock(TOTAL)
    for carried in (2**63 - 1, 0, 2**63 - 1):
        clock.note(carried, 2**40)
    assert clock.step(0) <= TOTAL
    assert clock.step(2**50) == TOTAL
    assert clock.own_steps_each(2**50) >= 1


def test_a_replica_that_took_over_a_state_goes_by_the_run_from_its_first_microbatches() -> None:
    clock, own = fed(each=1, steps=SEEN, begin=2_034)
    assert clock.step(own) == SEEN
    assert not clock.has_ended(own)


def test_the_end_is_seen_as_nearly_as_microbatches_show_it() -> None:
    clock, own = fed(each=2, steps=TOTAL)
    assert clock.has_ended(own)
    assert not fed(each=2, steps=TOTAL - 3 * SEEN)[0].has_ended(2 * (TOTAL - 3 * SEEN))
    short = RunClock(10)
    for step in range(5):
        short.note(step, step)
    assert not short.has_ended(5)
    assert RunClock(TOTAL).has_ended(TOTAL)
    assert not RunClock(TOTAL).has_ended(TOTAL - 1)
