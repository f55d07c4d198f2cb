"""The record of events on a full disk: told once, nothing ends, and it goes on as soon as there is room."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootstrap.display import write_whole
from node.watch.events import JsonLines, set_up_logging

Limit = Callable[[int], None]


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Path]:
    """The log file of a process that logs as the daemon does."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield tmp_path / "node.log"
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level = before


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
    logged: Path, file_size: Limit, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(verbose=False, file=logged)
    logging.getLogger("noloco").info("room")
    file_size(logged.stat().st_size)
    into_file = logging.getLogger().handlers[1]
    into_file.handle(logging.LogRecord("noloco", logging.INFO, "", 0, "no room", None, None))
    file_size(1 << 20)
    assert "Logging error" not in capfd.readouterr().err


def test_a_log_does_not_grow_without_end(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.watch.events.LOG_BYTES", 10_000)
    set_up_logging(verbose=True, file=logged)
    for number in range(1_000):
        logging.getLogger("node").debug("line %d of what a developer has asked for", number)
    files = sorted(logged.parent.glob("node.log*"))
    assert [file.name for file in files] == ["node.log", "node.log.1"]
    assert sum(file.stat().st_size for file in files) <= 20_000
    assert "line 999 of" in logged.read_text()


def test_both_the_terminal_and_the_log_show_so_many_lines_a_minute(
    logged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(verbose=False, file=logged)
    for _ in range(1_000):
        try:
            raise KeyError("what a peer has sent")
        except KeyError:
            logging.getLogger("protocol.rpc.answering").exception("Failed to answer %s", "predict")
    for text in (logged.read_text(), capfd.readouterr().err):
        assert text.count("Traceback") == text.count("Failed to answer predict") == 20


def test_a_name_that_is_not_utf_8_is_a_line_like_others(
    logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Python has it of such a file's name: it was sixty lines of "Logging error", and no line in the log."""
    named = tmp_path / os.fsdecode(b"caf\xe9.txt")
    named.write_text("text", encoding="utf-8")
    set_up_logging(verbose=False, file=logged)
    [listed] = [path for path in tmp_path.iterdir() if path.suffix == ".txt"]
    logging.getLogger("noloco").warning("Reading %s.", listed)
    said = capsys.readouterr().err
    assert "Logging error" not in said
    assert "Traceback" not in said
    written = logged.read_text(encoding="utf-8")
    assert written.count("\n") == 1
    assert r"caf\udce9.txt." in written
    lines = JsonLines(tmp_path / "events.jsonl")
    lines({"event": "data", "file": str(listed)})
    lines.close()
    [event] = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(event)["file"] == str(listed)
    write_whole(tmp_path / "told", f"{listed}\n", "Choose another.")
    assert r"caf\udce9.txt" in (tmp_path / "told").read_text(encoding="utf-8")
