"""What a node says of itself: the phases of its start, how training goes, and nothing that libraries say."""

from __future__ import annotations

import io
import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from node.config import NodeConfig, arguments_of, build_config
from node.watch.events import set_up_logging
from node.watch.panel import panel_of
from node.watch.phases import Phases
from node.watch.pulse import Pulse, farewell, sentence
from node.watch.screen import Screen
from node.watch.time_use import Idle, TimeUse
from node.watch.trace import TraceFile, Track
from node.watch.words import count, duration
from protocol.messages.peers import LossTrend
from protocol.records.identity import Identity


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


PULSE = Pulse(
    stage=1,
    step=1_234,
    total_steps=20_000,
    loss=3.2,
    trend=LossTrend(300.0, 3.301, 3.214, 0.01),
    tokens_per_second=7_201.4,
    busy=0.83,
    idle={Idle.ON_THE_WAY: 0.11, Idle.NOTHING: 0.06},
    upload=1.5e6,
    download=1.25e6,
    given=1_240_000,
    seconds_left=9_000.0,
)


def test_each_phase_is_told_repeated_ever_more_rarely_and_the_end_says_what_took_how_long() -> None:
    said, clock = list[str](), FakeClock()
    phases = Phases(said.append, clock, said.append)
    phases.begin("loading torch")
    for _ in range(9):
        clock.now += 1.0
        phases.look()
    clock.now += 2.0
    phases.look()
    share = [0.43]
    phases.begin("getting the state of stage 1", lambda: f"{share[0]:.0%} of it is here")
    clock.now += 10.0
    phases.look()
    clock.now += 0.5
    phases.end()
    assert said == [
        "Loading torch …",
        "Still loading torch (11 s).",
        "Getting the state of stage 1: 43% of it is here",
        "Still getting the state of stage 1: 43% of it is here (10 s).",
        "Began to train after 21.5 s: loading torch 11.0 s, getting the state of stage 1 10.5 s.",
    ]
    clock.now += 100.0
    phases.look()
    phases.end()
    assert len(said) == 5
    phases.begin("measuring memory")  # after a move
    clock.now += 2.0
    phases.end()
    assert said[-1] == "Began to train after 2.0 s: measuring memory 2.0 s."
    phases.begin("waiting for the first step")  # of a stage that is given up before
    phases.drop()
    clock.now += 100.0
    phases.look()
    phases.end()
    assert len(said) == 8


def test_a_wait_is_written_in_a_file_at_seconds_that_grow_and_when_something_else_is_missing() -> None:
    said, clock, missing = list[tuple[float, str]](), FakeClock(), [""]
    phases = Phases(
        lambda line: said.append((clock.now, line)), clock, lambda line: said.append((clock.now, line))
    )
    phases.begin("waiting for the first step", lambda: f"{clock.now:.0f} of 9,999", lambda: missing[0])
    for _ in range(4 * 3600):
        clock.now += 1.0
        phases.look()
    assert [at for at, _ in said] == [0, 10, 30, 60, 300, *range(1800, 4 * 3600 + 1, 1800)]
    missing[0] = "Missing before anything is trained: stage 0."
    phases.look()
    clock.now += 10.0
    phases.look()
    missing[0] = ""
    phases.look()
    assert [line for _, line in said[-3:]] == [
        "Missing before anything is trained: stage 0.",
        "Missing before anything is trained: stage 0. (10 s)",
        "Waiting for the first step: 14410 of 9,999",
    ]


def test_the_first_line_of_a_wait_tells_no_time_though_the_clock_goes_on() -> None:
    said, ticks = list[str](), itertools.count(0.0, 1e-6)
    phases = Phases(said.append, lambda: next(ticks), said.append)
    phases.begin("loading torch")
    phases.look()
    phases.begin("waiting for the first step", missing=lambda: "Missing before anything is trained: stage 1.")
    phases.look()
    assert said == ["Loading torch …", "Missing before anything is trained: stage 1."]


def test_on_a_terminal_one_line_is_rewritten_and_what_is_logged_stands_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, clock = io.StringIO(), FakeClock()
    screen = Screen(Console(file=shown, force_terminal=True, width=80))
    logger = logging.getLogger("noloco")
    monkeypatch.setattr(logger, "propagate", False)  # what other handlers say goes to the screen, too
    logger.addHandler(screen)
    logger.setLevel(logging.INFO)
    try:
        phases = Phases(clock=clock, rewrite=screen.wait)
        phases.begin("loading torch")
        for _ in range(100):
            clock.now += 1.0
            phases.look()
        logger.info("Serving stage 0.")
        phases.end()
    finally:
        logger.removeHandler(screen)
        screen.close()
    assert shown.getvalue().count("\n") == 3, "two lines that stay, and the end of the one that goes"
    assert "Still loading torch (99 s)." in shown.getvalue()
    assert "Serving stage 0.\n" in shown.getvalue()


def test_the_line_has_everything_that_a_volunteer_asks() -> None:
    assert sentence(PULSE) == (
        "Step 1,234 of 20,000, about 2.5 h left, loss 3.214 (3.301 5.0 min ago), 7,201 tokens/s, busy 83% "
        "(else most: gradients on the way 11%), 12 Mbit/s up, 10 down, 1.24 million tokens given in all."
    )


def test_a_node_behind_a_router_says_how_it_reaches_others_there() -> None:
    told = "12 Mbit/s up, 10 down, 1 peer behind routers met directly, 2 peers reached through others, 1.24 million"
    assert told in sentence(replace(PULSE, met_directly=1, relayed=2))


def test_a_node_without_a_next_stage_shows_no_speed() -> None:
    line = sentence(replace(PULSE, no_peer_seconds=32.0, next_stage=2, of_peak=0.38))
    assert "nobody serves stage 2 for 32 s" in line
    assert "tokens/s" not in line
    assert "38% of the device's peak" in line


def test_the_panel_says_the_same() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(panel_of(replace(PULSE, device="NVIDIA H100", of_peak=0.38), "run 'tiny' …abcd"))
    text = console.export_text()
    for part in (
        "run 'tiny' …abcd, stage 1",
        "1,234 of 20,000, about 2.5 h left",
        "3.214 (3.301 5.0 min ago)",
        "NVIDIA H100, 38% of the device's peak",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_lines_stand_above_the_panel_and_are_not_read_as_markup() -> None:
    shown = io.StringIO()
    panel = Screen(Console(file=shown, force_terminal=True, width=90))
    panel.show(panel_of(PULSE, "run"))
    panel.emit(logging.LogRecord("noloco", logging.INFO, "", 0, "a [bold]line", None, None))
    panel.close()
    assert "a [bold]line" in shown.getvalue()
    assert shown.getvalue().rindex("a [bold]line") > shown.getvalue().index("gradients on the way")


def test_the_last_words_have_the_command_that_begins_the_next_life(tmp_path: Path) -> None:
    config = build_config({"state_dir": tmp_path / "my node", "threads": 2, "moves": False}, {})
    words = farewell(7_000.0, 1_240_000, 30, arguments_of(config, only_changed=True))
    assert words == (
        "This node was here for 116.7 min and gave 1.24 million tokens in 30 rounds. Start it again: "
        f"noloco join '--state-dir={tmp_path}/my node' --no-moves --threads=2"
    )
    assert arguments_of(NodeConfig(), only_changed=True) == []
    assert farewell(60.0, 10, 1, None).endswith("in 1 rounds.")  # after a failure, which says what to do


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "-"), (0.31, "0.31 s"), (32, "32 s"), (300, "5.0 min"), (9e3, "2.5 h"), (2e5, "2.3 days")],
)
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (950, "950"),
        (12_400, "12,400"),
        (1.24e6, "1.24 million"),
        (3.014e10, "30.1 billion"),
        (5e15, "5,000 trillion"),
    ],
)
def test_counts(number: float, told: str) -> None:
    assert count(number) == told


# --- the last minute ------------------------------------------------------------------------------


def test_time_that_is_not_computed_goes_to_the_first_cause_that_fits(tmp_path: Path) -> None:
    clock = FakeClock()
    use = TimeUse(TraceFile(tmp_path / "trace.json", clock), clock)
    peer = Identity.from_seed("peer").peer_id
    frames = use.frames()
    number = use.async_begin(Track.GRADIENT, "wait for a gradient")
    clock.now += 10.0
    use.complete(Track.COMPUTE, "forward", 0.0, 4.0)
    frames.sent("pipeline", peer, "forward", 1_000_000, 4.0)  # until now
    clock.now += 10.0
    shares = use.idle()
    assert shares[Idle.MOVING] == pytest.approx(0.3)
    assert shares[Idle.ON_THE_WAY] == pytest.approx(0.5)
    assert sum(shares.values()) == pytest.approx(0.8)
    use.async_end(Track.GRADIENT, "wait for a gradient", number)
    clock.now += 20.0
    assert use.idle()[Idle.NOTHING] == pytest.approx(0.5)
    assert use.bytes_per_second(Track.SEND) == pytest.approx(25_000)
    clock.now += 27.0  # of the frame's six seconds three are in the last minute
    assert use.bytes_per_second(Track.SEND) == pytest.approx(500_000 / 60)
    use.close()
    assert '"forward"' in (tmp_path / "trace.json").read_text()


# --- libraries ------------------------------------------------------------------------------------


@pytest.fixture
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("logging_restored")
def test_what_libraries_say_goes_to_the_file_and_not_to_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    set_up_logging(verbose=False, file=tmp_path / "node.log")
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("`past_key_values` is deprecated", FutureWarning, stacklevel=1)
    logging.getLogger("node.service.trainer").warning("a problem of ours")
    written = (tmp_path / "node.log").read_text(encoding="utf-8")
    assert "a problem of ours" in shown.getvalue()
    for debris in ("Task exception", "past_key_values"):
        assert debris not in shown.getvalue()
        assert debris in written
    lines = [line for line in written.splitlines() if "a problem of ours" in line]
    day = lines[0].partition("  ")[0]
    assert datetime.fromisoformat(day).tzinfo is not None, "a file is read days later, and elsewhere"
    assert day not in shown.getvalue()
