"""`noloco swarm --chaos`: which faults come to whom, and what the comparison makes of two runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bootstrap.inspect.observer import Sighting
from bootstrap.lab.chaos.chaos import ChaosReport, loss_at
from bootstrap.lab.chaos.disturber import KINDS, SECONDS, Schedule, SeenFault
from bootstrap.local.summary import Run, TokenCount
from node.membership.view import Member
from protocol.messages.peers import NodeStats
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity

STAGES = {f"s{stage}r{replica}": stage for stage in range(2) for replica in range(3)}
CALM = Run(60_000, 60.0, 1.0, [(0, 5.0), (30_000, 3.0), (60_000, 2.0)])
DISTURBED = Run(36_000, 60.0, 0.8, [(0, 5.0), (36_000, 2.9)])


def test_a_seed_gives_the_same_faults_again() -> None:
    one, two = (Schedule(7, STAGES) for _ in range(2))
    faults = [one.draw(STAGES) for _ in range(40)]
    assert faults == [two.draw(STAGES) for _ in range(40)]
    assert faults != [Schedule(8, STAGES).draw(STAGES) for _ in range(40)]


def test_seven_periods_show_every_kind() -> None:
    schedule = Schedule(1, STAGES)
    for _ in range(5):
        drawn = [schedule.draw(STAGES) for _ in KINDS]
        assert {fault.kind for fault in drawn if fault is not None} == set(KINDS)


def test_faults_last_as_long_as_they_should_and_nan_comes_where_the_loss_is() -> None:
    schedule = Schedule(2, STAGES)
    for _ in range(200):
        fault = schedule.draw(STAGES)
        assert fault is not None
        least, most = SECONDS[fault.kind]
        assert least <= fault.seconds <= most
        assert (fault.hours != 0) == (fault.kind == "clock")
        assert fault.kind != "nan" or STAGES[fault.node] == 1


def test_the_last_well_replica_of_a_stage_is_left_alone() -> None:
    schedule = Schedule(3, STAGES)
    for _ in range(100):
        fault = schedule.draw(["s0r1", "s1r0", "s1r2"])
        assert fault is None or STAGES[fault.node] == 1
    assert schedule.draw(["s0r1", "s1r2"]) is None
    assert schedule.draw([]) is None


def test_losses_are_compared_at_the_same_tokens() -> None:
    report = ChaosReport(1, True, CALM, DISTURBED)
    tokens, calm, disturbed = report.losses or (0, 0.0, 0.0)
    assert (tokens, disturbed) == (36_000, 2.9)
    assert calm == pytest.approx(2.8)
    assert loss_at(CALM.losses, 60_001) is None


def test_throughput_is_of_what_those_who_were_there_would_do() -> None:
    assert ChaosReport(1, True, CALM, DISTURBED).throughput == pytest.approx(0.6 / 0.8)
    assert ChaosReport(1, True, Run(), DISTURBED).throughput is None


def test_the_report_says_what_was_not_reached() -> None:
    seen = [SeenFault(15.0, "kill", "s0r1", 2.0, 5, "")]
    report = ChaosReport(1, True, CALM, DISTURBED, seen, {"s1r0": "exit code 1"}, {"discovery": 2}, ["x"])
    text = "\n".join(report.lines())
    assert "+0.100 (NOT reached, wanted: at most +0.05)" in text
    assert "0.75 of what they would do (wanted: at least 0.7)" in text
    assert "s1r0: exit code 1" in text
    assert "discovery 2×" in text
    well = replace(report, disturbed=replace(DISTURBED, tokens=20_000, losses=CALM.losses), ended={})
    text = "\n".join(well.lines())
    assert "+0.000 (wanted" in text
    assert "NOT reached, wanted: at least 0.7" in text
    assert json.loads(json.dumps(report.for_summary()))["throughput"] == pytest.approx(0.75)


def test_two_runs_without_measurements_are_reported_too() -> None:
    assert "nodes that ended   none" in ChaosReport(1, False, Run(), Run()).lines()


def test_tokens_of_a_node_that_was_restarted_are_counted_on() -> None:
    count = TokenCount()
    for tokens in (100, 300, 250, 400):  # from its checkpoint
        count.note([sighting("a", tokens), sighting("b", 10)])
    assert count.total == 410
    for tokens in (20, 80):  # with the state of others
        count.note([sighting("a", tokens), sighting("b", 10)])
    assert count.total == 490


def sighting(name: str, tokens: int) -> Sighting:
    record = Announcement(
        stage=0, state="serving", since=0.0, step=7, round=1, loss=None, tokens_per_second=0.0, addresses=[]
    )
    stats = NodeStats(stage=0, state="serving", step=7, round=1, tokens=tokens)
    return Sighting(Member(Identity.from_seed(name).peer_id, record, 1e12), stats)
