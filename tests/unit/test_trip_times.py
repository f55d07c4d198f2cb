"""How long a proposal is waited for, where some partners are near and some are far."""

from __future__ import annotations

from node.links.trip_times import FIRST_DEADLINE, LEAST_DEADLINE, TripTimes
from protocol.ground import PeerId

NEAR, FAR = PeerId("near"), PeerId("far")


def met(near: float, far: float) -> TripTimes:
    """One who knows both, and has heard of the near one alone lately."""
    times = TripTimes()
    for _ in range(3):
        times.answered(FAR, far)
    for _ in range(40):
        times.answered(NEAR, near)
    return times


def test_a_far_partner_is_given_its_time_although_the_last_answers_were_near() -> None:
    times = met(0.01, 0.08)
    assert times.deadline_of(FAR) > 2 * 0.08
    assert times.deadline_of(NEAR) == LEAST_DEADLINE
    assert times.round_trip == 0.01


def test_who_was_never_met_or_fell_silent_gets_the_first_deadline() -> None:
    times = met(0.01, 0.08)
    assert times.deadline_of(PeerId("new")) == FIRST_DEADLINE
    times.missed(FAR)
    assert times.deadline_of(FAR) == FIRST_DEADLINE


def test_no_partner_gets_more_than_the_first_deadline() -> None:
    times = met(0.01, 1.9)
    assert times.deadline_of(FAR) == FIRST_DEADLINE
