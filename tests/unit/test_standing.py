"""A replica is behind when it missed rounds that its own speed allowed, and never for being slow."""

from __future__ import annotations

import pytest

from node.rounds.pace import LEAST_AWAY, LOSS_AGAIN_SECONDS, ODD_SECONDS, RETRY_SECONDS, Other, Standing
from protocol.ground import PeerId

LIFETIME = 300.0
ROUND = 10.0  # seconds


def others(*rounds: int, rate: float = 100.0) -> list[Other]:
    return [Other(PeerId(f"peer {number}"), round_, rate) for number, round_ in enumerate(rounds)]


def alone() -> Standing:
    standing = Standing(LIFETIME)
    standing.began_alone()
    return standing


def trained_until(now: float, *rounds: int) -> Standing:
    """One that belongs, at round 10, and has seen the others at these rounds when it last ended a step."""
    standing = Standing(LIFETIME)
    for time in (now - 1.0, now):
        standing.step_done(time, 10, 100.0, ROUND, others(*rounds))
    return standing


def test_who_began_alone_finds_itself_behind_when_most_of_the_others_are_far_ahead() -> None:
    assert alone().why_behind(0.0, 0, 100.0, others(40, 41, 39))
    assert alone().why_behind(0.0, 0, 100.0, others(40))
    assert not alone().why_behind(0.0, 0, 100.0, others(4, 3, 4)), "these may as well average"
    assert not alone().why_behind(0.0, 0, 100.0, others())


def test_one_of_several_says_nothing() -> None:
    assert not alone().why_behind(0.0, 0, 100.0, others(10**6, 0, 1))
    assert not alone().why_behind(0.0, 0, 100.0, others(10**6, 0))


@pytest.mark.parametrize("slower", [3, 5, 10, 30])
@pytest.mark.parametrize("round_", [0, 1, 2, 7])
def test_nobody_is_behind_for_being_slow(slower: int, round_: int) -> None:
    at_once = [int(slower * (round_ + 1) * 1.25)] * 3
    assert not alone().why_behind(0.0, round_, 100.0 / slower, others(*at_once))


def test_until_speeds_are_known_nobody_is_behind() -> None:
    assert not alone().why_behind(0.0, 0, 0.0, others(40, 41))
    assert not alone().why_behind(0.0, 0, 100.0, others(40, 41, rate=0.0))


def test_who_has_averaged_or_downloaded_is_never_sent_back_by_what_others_say() -> None:
    averaged, downloaded = alone(), alone()
    averaged.met()
    downloaded.downloaded()
    for standing in (averaged, downloaded, Standing(LIFETIME)):
        assert not standing.is_alone
        assert not standing.why_behind(0.0, 0, 100.0, others(10**6, 10**6, 10**6))


def test_who_stood_still_while_the_others_went_on_is_behind_once_it_knows() -> None:
    standing = trained_until(100.0, 10, 10, 10)
    standing.step_done(700.0, 10, 100.0, ROUND, others(10, 10, 10))  # it has not read their new records
    assert not standing.why_behind(700.0, 10, 100.0, others(10, 10, 10))
    standing.step_done(701.0, 10, 10.0, ROUND, others(69, 70, 71))
    assert "600 s" in standing.why_behind(701.0, 10, 10.0, others(69, 70, 71))
    standing.downloaded()
    assert not standing.why_behind(702.0, 70, 10.0, others(69, 70, 71))


def test_a_slow_one_that_stood_still_is_behind_as_well() -> None:
    standing = Standing(LIFETIME)
    standing.step_done(100.0, 10, 10.0, 10 * ROUND, others(100, 100))
    standing.step_done(1_600.0, 10, 10.0, 10 * ROUND, others(250, 251))
    assert standing.why_behind(1_600.0, 10, 10.0, others(250, 251))


@pytest.mark.parametrize("lag", [0, 15])
def test_a_stage_that_stood_still_together_is_not_behind(lag: int) -> None:
    """Though the records before were `lag` rounds old, and the others end rounds since then."""
    standing = trained_until(100.0, 10, 10, 10)
    for since in range(30):
        now, rounds = 700.0 + ROUND * since, [10 + lag + since] * 3
        standing.step_done(now, 10 + since, 100.0, ROUND, others(*rounds))
        assert not standing.why_behind(now, 10 + since, 100.0, others(*rounds))
    now = 700.0 + LIFETIME + 1.0
    standing.step_done(now, 40, 100.0, 1e6, others(10, 11, 10))
    assert not standing.why_behind(now, 40, 100.0, others(900, 900, 900))


def test_rounds_that_others_ended_while_this_one_trained_say_nothing() -> None:
    standing = trained_until(100.0, 10, 10)
    for step in range(200):
        standing.step_done(101.0 + step, 11, 10.0, ROUND, others(10 + step, 10 + step))
    assert not standing.why_behind(301.0, 11, 10.0, others(209, 209))


@pytest.mark.parametrize(("lifetime", "round_seconds"), [(1.0, 0.1), (LIFETIME, 0.1), (1.0, 100.0)])
def test_a_short_stop_is_none(lifetime: float, round_seconds: float) -> None:
    """Shorter than a minute, than a record's life, or than a few of its own rounds."""
    standing = Standing(lifetime)
    standing.step_done(100.0, 10, 100.0, round_seconds, others(10, 10))
    now = 99.0 + max(LEAST_AWAY, lifetime)
    standing.step_done(now, 10, 100.0, round_seconds, others(10, 10))
    assert not standing.why_behind(now, 10, 100.0, others(900, 900))


def test_after_a_download_that_failed_training_goes_on_for_a_while() -> None:
    standing = alone()
    standing.download_failed(50.0)
    assert not standing.why_behind(51.0, 0, 100.0, others(40, 41))
    assert standing.why_behind(51.0 + RETRY_SECONDS, 0, 100.0, others(40, 41))


# --- losses -------------------------------------------------------------------------------------


def telling(*losses: float) -> list[Other]:
    return [Other(PeerId(f"peer {n}"), 100, 100.0, loss) for n, loss in enumerate(losses)]


def after_losses(loss: float, others: list[Other], seconds: float) -> str:
    standing = Standing(45.0)
    for second in range(int(seconds) + 1):
        standing.note_loss(float(second), loss, others)
    return standing.why_behind(seconds, 100, 100.0, others)


def test_a_loss_far_above_the_others_for_long_is_that_of_other_weights() -> None:
    assert "its loss of 4.00 is far above 2.15" in after_losses(4.0, telling(2.0, 2.1, 2.2, 9.0), ODD_SECONDS)
    assert not after_losses(4.0, telling(2.0, 2.1, 2.2), ODD_SECONDS / 2), "that may pass"
    assert not after_losses(4.0, telling(2.0, 2.1), ODD_SECONDS), "two may both be wrong"
    assert not after_losses(2.4, telling(2.0, 2.1, 2.2), ODD_SECONDS)
    assert not after_losses(4.0, telling(1.0, 2.1, 3.2), ODD_SECONDS), "they differ as much themselves"


def test_two_liars_of_five_make_nobody_download() -> None:
    assert not after_losses(2.1, telling(2.0, 2.1, 2.2, 0.0, 0.0), ODD_SECONDS)


def test_after_a_download_the_losses_of_before_do_not_count() -> None:
    standing, others_ = Standing(45.0), telling(2.0, 2.1, 2.2)
    standing.step_done(0.0, 100, 100.0, 1.0, others_)
    standing.note_loss(0.0, 4.0, others_)
    standing.note_loss(ODD_SECONDS, 4.0, others_)
    assert standing.why_behind(ODD_SECONDS, 100, 100.0, others_)
    standing.downloaded()
    for second in range(int(LOSS_AGAIN_SECONDS)):
        standing.note_loss(float(second), 4.0, others_)
        assert not standing.why_behind(float(second), 100, 100.0, others_)
