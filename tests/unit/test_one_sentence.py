"""What is wrong with a run is said in one sentence, and in the same by `status`, page, log and metrics."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from bootstrap.dashboard.board import Board, facts_of
from bootstrap.dashboard.metrics import exposition
from bootstrap.dashboard.wording import Voice, Wording
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.status import RunStatus, shown
from node.watch.words import clock_time
from protocol.messages.peers import Awaited, LossBest
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from tests.unit.test_verdict import FALLS, RISES, node, pairs

ROOT = Path(__file__).parents[2]
MANIFEST = load_preset("tiny")
PEER = Identity.from_seed("awaited").peer_id
FAST = {"seconds_per_microbatch": 0.1, "recent_compute_fraction": 0.3}
SLOW = {"seconds_per_microbatch": 0.4, "recent_compute_fraction": 0.97}


def stage_one(**numbers: Any) -> list[Sighting]:
    return [*pairs(1), *(node(1, number, **numbers) for number in range(2))]


def with_clocks(*ahead: float) -> list[Sighting]:
    return [replace(sighting, ahead=seconds) for sighting, seconds in zip(pairs(2), ahead, strict=True)]


CASES: dict[str, tuple[list[Sighting], str]] = {
    "stage-empty": (
        [node(0, n, no_peer_seconds=32.0) for n in range(2)],
        "stage 1: nobody for 32 s, training stands still",
    ),
    "one-replica": ([*pairs(1), node(1)], "stage 1 has only one replica"),
    "slow-stage": (
        [*pairs(1, **FAST), *(node(1, n, **SLOW) for n in range(2))],
        "everyone waits for stage 1, which is slow: every other stage could do 4.0 times as much",
    ),
    "loss-rises": (pairs(2, trend=RISES), "the loss rises: 2.28 → 2.41 in the last 30.0 min"),
    "loss-jumped": (
        pairs(2, trend=FALLS, loss=5.21, best=LossBest(3.62, 1.0, 0.01)),
        f"loss 5.21, was 3.62 at {clock_time(1.0, 1.0)}",
    ),
    "begun-anew": (
        [*(node(0, n, beginning=1, begun=1.0, time=2.0) for n in range(2)), *pairs(2)[2:]],
        f"stage 0 was begun anew at {clock_time(1.0, 1.0)}: it learns from the start again",
    ),
    "waiting": (
        [node(0, state="joining", awaited=Awaited(0, 486, PEER, 1.0, 900.0), time=181.0), *pairs(2)[2:]],
        f"stage 0 was at step 486; …{PEER[-8:]} had it 3 min ago. Waiting for it until "
        f"{clock_time(900.0, 1.0)}; begin anew with --begin-anew",
    ),
    "step-fell-back": (
        [*pairs(1, step=3), *(node(1, n, step=486) for n in range(2))],
        "stage 0 is at step 3 beside stage 1 at 486: it fell back, or was begun anew",
    ),
    "spread": (
        stage_one(spread=4e-3, expected_spread=1e-3, round=8),
        "stage 1: the spread is out of its band, replicas are 4 times as far apart as the theory says",
    ),
    "old-version": (
        stage_one(version="0.0.9"),
        "2 nodes run version 0.0.9, older than 0.1.0: ask for an upgrade",
    ),
    "clock": (
        with_clocks(0.1, -0.2, -41.0, 0.0),
        "the clock of 1 node is 41 s behind the others': switch on time synchronisation there",
    ),
    "no-disk": (
        [*pairs(1), node(1), node(1, 1, cannot_save=True)],
        "1 node cannot write its checkpoints: no disk, or none with room; what is trained there is lost when it ends",
    ),
}


def board_of(sightings: list[Sighting]) -> Board:
    board = Board(facts_of(MANIFEST, "0123"), Wording(MANIFEST.stages, version="0.1.0"))
    for sighting in sightings:
        board.see(sighting, 1.0)
    board.conclude(2.0)
    return board


@pytest.mark.parametrize("kind", CASES)
def test_the_four_places_say_the_same(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    sightings, sentence = CASES[kind]
    board = board_of(sightings)
    (found,) = [finding for finding in board.findings if finding.kind == kind]
    assert found.sentence == sentence
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(shown(RunStatus("0123", MANIFEST, Seen(MANIFEST.stages, sightings, version="0.1.0")), 150))
    assert f"{sentence}." in console.export_text()
    assert sentence in [text for _, text, _ in board.change_since(0)["remarks"]]
    samples = [
        sample.labels
        for family in text_string_to_metric_families(exposition(board)[0].decode())
        for sample in family.samples
        if sample.name == "noloco_finding_words"
    ]
    assert {
        "kind": kind,
        "stage": "" if found.stage is None else str(found.stage),
        "sentence": sentence,
    } in samples
    with caplog.at_level(logging.INFO, "noloco"):
        Voice().note(board.findings)
    assert f"{sentence}." in [record.getMessage() for record in caplog.records]


def test_nobody_is_told_of_anything_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    board = board_of(with_clocks(0.1, -0.2, 0.3, -4.0))
    with caplog.at_level(logging.INFO, "noloco"):
        Voice().note(board.findings)
    assert not caplog.records
    assert {finding.severity for finding in board.findings} == {Severity.FINE}


def test_an_observer_whose_own_clock_is_wrong_blames_itself() -> None:
    (found,) = [f for f in board_of(with_clocks(61.0, 60.2, 59.9, 60.0)).findings if f.kind == "clock"]
    assert found.sentence == (
        "the clock of this machine, which watches, is 60 s behind the run's: switch on time synchronisation"
    )


def test_the_log_tells_what_comes_and_what_is_over_and_not_that_numbers_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    voice = Voice()
    with caplog.at_level(logging.INFO, "noloco"):
        for seconds in (32, 33):
            voice.note([Finding(Severity.ALARM, "stage-empty", f"stage 1: nobody for {seconds} s", 1)])
        voice.note([Finding(Severity.FINE, "learning", "learning: 3 → 2")])
    assert [record.getMessage() for record in caplog.records] == [
        "stage 1: nobody for 32 s.",
        "No longer: stage 1: nobody for 33 s.",
    ]


def test_no_console_takes_square_brackets_for_markup() -> None:
    """They are in what people are to type: pip install 'noloco-node[transformers]'."""
    made = [
        (file.name, call)
        for folder in ("bootstrap", "node")
        for file in (ROOT / folder).rglob("*.py")
        for call in re.findall(r"\bConsole\([^)]*\)", file.read_text(encoding="utf-8"))
    ]
    assert made
    assert [call for _, call in made if "markup=False" not in call] == []
