"""What is said of a swarm, from the numbers that its nodes give."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.verdict import in_a_word, tokens_per_second, verdict
from node.membership.view import Member
from node.watch.loss_history import HOUR, LossHistory
from protocol.messages.peers import LossTrend, NodeStats
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity

FALLS = LossTrend(3600.0, 2.31, 2.28, 0.002)
RISES = LossTrend(1800.0, 2.28, 2.41, 0.01)


def node(stage: int, number: int = 0, **numbers: Any) -> Sighting:
    record = Announcement(stage=stage, state="serving", since=0.0)
    told = {
        "state": "serving",
        "step": 7,
        "round": 1,
        "version": "0.1.0",
        "tokens_per_second": 500.0,
        **numbers,
    }
    member = Member(Identity.from_seed("verdict", stage, number).peer_id, record, 1e12)
    return Sighting(member, NodeStats(stage=stage, **told))


def silent(stage: int) -> Sighting:
    return Sighting(node(stage, 9).member, None)


def pairs(stages: int, **numbers: Any) -> list[Sighting]:
    """Two replicas of each stage."""
    return [node(stage, number, **numbers) for stage in range(stages) for number in range(2)]


def said(stages: int, sightings: list[Sighting], **more: Any) -> list[Finding]:
    return verdict(Seen(stages, sightings, version="0.1.0", **more))


def sentences(found: list[Finding]) -> list[str]:
    return [finding.sentence for finding in found]


def test_a_run_that_learns_is_said_to_in_one_sentence() -> None:
    found = said(3, pairs(3, trend=FALLS))
    assert sentences(found) == ["learning: 2.31 → 2.28 in the last hour"]
    assert found[0].severity is Severity.FINE


def test_an_empty_stage_comes_first_with_how_long_it_has_been_so_and_no_tokens_are_trained() -> None:
    swarm = [*(node(0, n, no_peer_seconds=32.0 - n, trend=FALLS) for n in range(2)), silent(1)]
    found = said(2, swarm)
    assert found[0] == Finding(
        Severity.ALARM, "stage-empty", "stage 1: nobody for 32 s, training stands still", 1
    )
    assert "learning" not in {finding.kind for finding in found}
    assert tokens_per_second(Seen(2, swarm)) == 0.0
    assert tokens_per_second(Seen(2, pairs(2))) == 1000.0


def test_an_empty_first_stage_is_known_by_the_last_step_of_the_others_and_who_watches_knows_it_best() -> None:
    others = [node(1, step_age=40.0), node(1, 1, step_age=45.0), node(0, state="joining")]
    (first, *_) = said(2, others)
    assert first.sentence == "stage 0: nobody for 40 s, training stands still; 1 is joining it"
    (first, *_) = said(2, others, empty_for={0: 600.0})
    assert first.sentence.startswith("stage 0: nobody for 10.0 min")


def test_a_stage_with_one_replica_is_named() -> None:
    found = said(4, [*pairs(3, trend=FALLS), node(3, trend=FALLS)])
    assert sentences(found) == ["stage 3 has only one replica", "learning: 2.31 → 2.28 in the last hour"]
    assert found[0].stage == 3


def test_a_slow_stage_for_which_all_others_wait() -> None:
    fast = {"seconds_per_microbatch": 0.1, "recent_compute_fraction": 0.3}
    slow = {"seconds_per_microbatch": 0.4, "recent_compute_fraction": 0.97}
    swarm = [*pairs(2, **fast), *(node(2, n, **slow) for n in range(2))]
    assert sentences(said(3, swarm))[0].startswith("everyone waits for stage 2, which is slow")
    for changes in ({"seconds_per_microbatch": 0.3}, {"recent_compute_fraction": 0.95}):
        alike = [*pairs(2, **(fast | changes)), *(node(2, n, **slow) for n in range(2))]
        assert "slow-stage" not in {finding.kind for finding in said(3, alike)}


def test_many_slow_replicas_are_as_good_as_few_fast_ones() -> None:
    swarm = [node(0, 0, seconds_per_microbatch=0.1, recent_compute_fraction=0.5), node(0, 1)]
    swarm += [node(1, n, seconds_per_microbatch=0.4, recent_compute_fraction=0.5) for n in range(8)]
    assert "slow-stage" not in {finding.kind for finding in said(2, swarm)}


def test_a_loss_that_rises_for_certain_is_an_alarm_and_noise_is_not() -> None:
    (alarm, *_) = said(2, pairs(2, trend=RISES))
    assert (alarm.severity, alarm.kind) == (Severity.ALARM, "loss-rises")
    assert alarm.sentence == "the loss rises: 2.28 → 2.41 in the last 30.0 min"
    (fine,) = said(2, pairs(2, trend=RISES._replace(error=0.1)))
    assert fine.sentence.startswith("the loss does not change for certain: 2.28 → 2.41")


@pytest.mark.parametrize(
    ("spread", "round_", "is_told"),
    [(5e-4, 8, False), (1e-3, 8, False), (4e-3, 8, True), (1e-4, 8, True), (4e-3, 7, False)],
)
def test_a_spread_out_of_its_band(spread: float, round_: int, is_told: bool) -> None:
    """Told once the estimates rest on enough rounds."""
    members = [node(1, n, spread=spread, expected_spread=1e-3, round=round_) for n in range(2)]
    found = said(2, [*pairs(1), *members])
    told = [finding for finding in found if finding.kind == "spread"]
    assert [finding.stage for finding in told] == [1] * is_told
    assert all("out of its band" in finding.sentence for finding in told)


def test_nodes_of_an_older_version_are_counted() -> None:
    swarm = [*pairs(2, version="0.2.0"), node(1, 3, version="0.1.9"), node(1, 4, version="")]
    (old, *_) = said(2, swarm)
    assert (old.kind, old.severity) == ("old-version", Severity.WARNING)
    assert old.sentence == "2 nodes run version 0.1.9, older than 0.2.0: ask for an upgrade"


@pytest.mark.parametrize(
    ("step", "total", "word", "sentence"),
    [
        (90, 90, "finished", "the run is complete"),
        (7, 9_000, "stopped", "training has stopped at step 7 of 9,000"),
        (7, 0, "stopped", "training has stopped at step 7, of how many is not known here"),
    ],
)
def test_a_run_that_was_stopped_before_its_end_is_not_called_finished(
    step: int, total: int, word: str, sentence: str
) -> None:
    for swarm in (pairs(2, state="finished", step=step), [node(1, state="finished", step=step)]):
        found = said(2, swarm, total_steps=total)
        assert sentences(found) == [f"{sentence}; its nodes serve the model"]
        assert in_a_word(found) == word


def test_a_run_where_nobody_answers() -> None:
    assert sentences(said(2, [silent(0)])) == ["no node of this run answers: nobody trains"]


def test_the_trend_is_of_the_last_hour_however_many_steps_it_has() -> None:
    short, long = LossHistory(), LossHistory()
    for step in range(7):
        short.note(float(step), 3.0)
    assert short.trend() is None
    for second in range(3 * int(HOUR)):
        long.note(float(second), 3.0 - second / HOUR)
    trend = long.trend()
    assert trend is not None
    assert trend.seconds == pytest.approx(HOUR, rel=0.1)
    assert trend.before == pytest.approx(3.0 - 2.125, abs=0.05)
    assert trend.now == pytest.approx(3.0 - 2.875, abs=0.05)


def test_people_are_shown_the_mean_of_thirty_steps_and_at_once_that_a_step_was_no_number() -> None:
    history = LossHistory()
    assert history.recent() is None
    for step in range(100):
        history.note(float(step), 2.0 + (1.0 if step % 2 else -1.0))
        if step >= 29:
            assert history.recent() == pytest.approx(2.0)
    history.note(100.0, float("nan"))
    assert math.isnan(history.recent() or 0.0)
    history.note(101.0, 3.0)
    assert history.recent() == pytest.approx(2.0, abs=0.11)


def test_a_loss_that_fell_and_then_rises_is_measured_from_its_lowest() -> None:
    history = LossHistory()
    for step in range(400):
        history.note(float(step), 5.0 - step / 100 if step < 250 else 2.5 + (step - 250) / 100)
    trend = history.trend()
    assert trend is not None
    assert trend.before < 3.0 < trend.now < 5.0
    assert trend.seconds < 300
