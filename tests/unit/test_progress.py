"""What a person reads while a swarm starts: what is being done, and not the same thing again and again."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bootstrap.local.progress import PACE_SECONDS, LineInPlace, StatusLine, what_nodes_do


class Screen:
    """Looked at every second of a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []
        self.progress = StatusLine(lambda line: self.lines.append((self.now, line)), clock=lambda: self.now)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += PACE_SECONDS
            self.progress.look()


def test_a_long_wait_is_written_ever_more_rarely_with_how_far_it_is() -> None:
    screen = Screen()
    screen.progress.doing("measuring", lambda: f"{screen.now:.0f} of 256 sequences")
    screen.wait(100)
    assert [at for at, _ in screen.lines] == [1, 11, 31, 61]
    assert screen.lines[1] == (11.0, "  11 s  measuring: 11 of 256 sequences")


def test_on_a_terminal_one_line_is_rewritten_and_vanishes() -> None:
    shown, now = io.StringIO(), [0.0]
    console = Console(file=shown, force_terminal=True, width=80)
    progress = StatusLine(console.print, LineInPlace(console), lambda: now[0])
    progress.doing("importing")
    for _ in range(100):
        now[0] += 1.0
        progress.look()
    console.print("a line that stays")
    progress.doing("")
    assert shown.getvalue().count("\n") == 2, "the line that stays, and the end of the one that goes"
    assert "100 s  importing" in shown.getvalue()


def test_something_new_is_told_at_once() -> None:
    screen = Screen()
    said = ["joining"]
    screen.progress.doing(lambda: said[0])
    screen.wait(2)
    said[0] = "serving"
    screen.wait(1)
    assert [line.split("  ")[-1] for _, line in screen.lines] == ["joining", "serving"]


def test_it_is_silent_while_others_speak() -> None:
    screen = Screen()
    screen.progress.doing("importing")
    screen.progress.doing("")
    screen.wait(30)
    assert not screen.lines


@pytest.mark.parametrize("last", ['{"event": "link"}\n', '{"event": "st', ""])
def test_nodes_that_do_the_same_share_their_words(tmp_path: Path, last: str) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "events.jsonl").write_text("")
    for name in ("c", "d"):
        (tmp_path / name / "events.jsonl").write_text('{"event": "serving"}\n' + last)
    told = what_nodes_do((path.name, path) for path in sorted(tmp_path.iterdir()))
    assert told == "a starting; b joining; c d serving"
