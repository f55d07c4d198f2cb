"""The record of events on a full disk: told once, nothing ends, and it goes on as soon as there is room."""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.watch.events import JsonLines, set_up_logging

Limit = Callable[[int], None]


@pytest.fixture
def file_size() -> Iterator[Limit]:
    """Sets how large a file may get: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_events_and_nothing_else(
    tmp_path: Path, file_size: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    lines = JsonLines(path)
    lines({"event": "first"})
    file_size(path.stat().st_size + 5)  # room for half a line
    for number in range(3):
        lines({"event": "lost", "number": number})
    file_size(1 << 20)
    lines({"event": "last"})
    lines.close()
    whole = [json.loads(line)["event"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert whole == ["first", "last"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "Free some disk space" in told[0]


def test_a_full_disk_fills_no_terminal_with_tracebacks(
    tmp_path: Path, file_size: Limit, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    set_up_logging(verbose=False, file=tmp_path / "node.log")
    made = root.handlers[:]
    try:
        logging.getLogger("noloco").info("room")
        file_size((tmp_path / "node.log").stat().st_size)
        made[1].handle(logging.LogRecord("noloco", logging.INFO, "", 0, "no room", None, None))
    finally:
        file_size(1 << 20)
        for handler in made:
            handler.close()
        root.handlers[:], root.level = before
    assert "Logging error" not in capfd.readouterr().err
