"""What a node says of itself: the phases of its start, how training goes, and nothing that libraries say."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from node.config import NodeConfig, arguments_of, build_config
from node.watch.events import set_up_logging
from node.watch.panel import LivePanel, panel_of
from node.watch.phases import PATIENCE, Phases
from node.watch.pulse import Pulse, farewell, sentence
from node.watch.time_use import Idle, TimeUse
from node.watch.trace import TraceFile, Track
from node.watch.words import count, duration
from protocol.identity import Identity
from protocol.messages.peers import LossTrend


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


def test_each_phase_is_told_and_repeated_before_anybody_wonders_and_the_end_says_what_took_how_long() -> None:
    said, clock = list[str](), FakeClock()
    phases = Phases(said.append, clock)
    phases.begin("loading torch")
    for _ in range(9):
        clock.now += 1.0
        phases.look()
    share = [0.43]
    phases.begin("getting the state of stage 1", lambda: f"{share[0]:.0%} of it is here")
    clock.now += PATIENCE
    phases.look()
    clock.now += 0.5
    phases.end()
    assert said == [
        "Loading torch …",
        "Still loading torch (3 s).",
        "Still loading torch (6 s).",
        "Still loading torch (9 s).",
        "Getting the state of stage 1 …",
        "Still getting the state of stage 1: 43% of it is here (3 s).",
        "Began to train after 12.5 s: loading torch 9.0 s, getting the state of stage 1 3.5 s.",
    ]
    clock.now += 100.0
    phases.look()
    phases.end()
    assert len(said) == 7
    phases.begin("measuring memory")  # after a move
    clock.now += 2.0
    phases.end()
    assert said[-1] == "Began to train after 2.0 s: measuring memory 2.0 s."
    phases.begin("waiting for the first step")  # of a stage that is given up before
    phases.drop()
    clock.now += 100.0
    phases.look()
    phases.end()
    assert len(said) == 10


def test_the_line_has_everything_that_a_volunteer_asks() -> None:
    assert sentence(PULSE) == (
        "Step 1,234 of 20,000, about 2.5 h left, loss 3.214 (3.301 5.0 min ago), 7,201 tokens/s, busy 83% "
        "(else most: gradients on the way 11%), 12 Mbit/s up, 10 down, 1.24 million tokens given in all."
    )


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
    panel = LivePanel(
        Console(file=shown, force_terminal=True, width=90),
    )
    panel.show(PULSE, "run")
    panel.emit(logging.LogRecord("noloco", logging.INFO, "", 0, "a [bold]line", None, None))
    panel.close()
    assert "a [bold]line" in shown.getvalue()
    assert shown.getvalue().rindex("a [bold]line") > shown.getvalue().index("gradients on the way")


def test_the_last_words_have_the_command_that_begins_the_next_life(tmp_path: Path) -> None:
    config = build_config({"state_dir": tmp_path / "my node", "threads": 2, "moves": False}, {})
    words = farewell(7_000.0, 1_240_000, 30, arguments_of(config, only_changed=True))
    assert words == (
        "This node was here for 116.7 min and gave 1.24 million tokens in 30 rounds. Start it again: "
        f"noloco-node '--state-dir={tmp_path}/my node' --no-moves --threads=2"
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
    logging.getLogger("node.trainer").warning("a problem of ours")
    written = (tmp_path / "node.log").read_text(encoding="utf-8")
    assert "a problem of ours" in shown.getvalue()
    for debris in ("Task exception", "past_key_values"):
        assert debris not in shown.getvalue()
        assert debris in written
