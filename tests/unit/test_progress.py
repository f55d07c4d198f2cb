"""What a person reads while a swarm starts: never nothing for long, never the same thing again and again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bootstrap.local.progress import PACE_SECONDS, SILENCE_SECONDS, StatusLine, what_nodes_do


class Screen:
    """Looked at every second of a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []
        self.progress = StatusLine(lambda line: self.lines.append((self.now, line)), lambda: self.now)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += PACE_SECONDS
            self.progress.look()


def test_no_five_seconds_pass_without_a_word() -> None:
    screen = Screen()
    screen.progress.doing("importing")
    screen.wait(60)
    times = [0.0, *(at for at, _ in screen.lines), screen.now]
    assert max(b - a for a, b in pairwise(times)) < 5
    assert len(screen.lines) <= 60 / SILENCE_SECONDS + 1
    assert screen.lines[0] == (1.0, "   1 s  importing")


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
