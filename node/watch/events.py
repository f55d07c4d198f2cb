"""Two records of a node's life: a log of sentences for the volunteer, and one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from node.watch.line_limit import LineLimit
from node.watch.phases import Phases
from node.watch.words import wrapped
from protocol.files.keeping import descriptor_of

LOG_BYTES = (
    8 << 20
)  # of a log, and as many of the one before it; a node that trains needs a few hundred kB a day

EVENT_BYTES = 128 << 20  # of events, and as many before them: some days of a step a second
STANDING = ("addresses", "serving")  # who a node is and what it does: told again where a file begins

OURS = ("noloco", "node", "protocol", "bootstrap")
LIBRARIES = (
    "TRANSFORMERS_VERBOSITY",
    "HF_HUB_VERBOSITY",
    "DATASETS_VERBOSITY",
)  # which have handlers of their own

logger = logging.getLogger("noloco")


class Events:
    """The structured event stream, and what goes on until training begins.

    `clock` gives the wall time in seconds; `sink` takes each event.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        sink: Callable[[dict[str, object]], None],
        phases: Phases | None = None,
    ) -> None:
        self._clock = clock
        self._sink = sink
        self.phases = phases or Phases(logger.debug, write=logger.debug)

    def emit(self, event: str, **fields: object) -> None:
        finite_fields = {name: finite_only(value) for name, value in fields.items()}
        self._sink({"time": round(self._clock(), 6), "event": event, **finite_fields})

    def say(self, sentence: str, event: str, **fields: object) -> None:
        """Tell the volunteer and record the event."""
        logger.info(sentence)
        self.emit(event, **fields)

    def begin(self, doing: str, detail: Callable[[], str] = str, missing: Callable[[], str] = str) -> None:
        """Begin the next phase of the start, see `Phases.begin`."""
        self.phases.begin(doing, detail, missing)
        self.emit("phase", doing=doing)

    def warn(self, sentence: str, event: str, **fields: object) -> None:
        logger.warning(sentence)
        self.emit(event, **fields)


class JsonLines:
    """Appends events to a file, one JSON object a line; a crash costs the last line at most.

    The file takes the place of the one before it when it has `EVENT_BYTES`: what that was is gone. Mutable state: the
    file and its size, what was wrong with the last write, whether it left half a line there, and what still stands.
    What cannot be written is dropped: a full disk stops no training.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fdopen(descriptor_of(path), "ab", buffering=0)
        self._size = path.stat().st_size
        self._problem = ""
        self._is_torn = False
        self._standing: dict[object, dict[str, object]] = {}

    def __call__(self, event: dict[str, object]) -> None:
        if event["event"] in STANDING:
            self._standing[event["event"]] = event | {"standing": True}
        try:
            if self._size > EVENT_BYTES:
                self._begin_again()
            self._write(event)
        except OSError as error:
            if not self._problem:
                self._problem = error.strerror or str(error)
                told = "Cannot write to %s (%s); training goes on without a record. Free some disk space."
                logger.warning(told, self._path, self._problem)
        else:
            self._problem = ""

    def _write(self, event: dict[str, object]) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        written = self._file.write(line)
        self._size += written
        self._is_torn = written < len(line)

    def _begin_again(self) -> None:
        self._path.replace(before(self._path))
        self._file.close()
        self._file, self._size, self._is_torn = (
            os.fdopen(descriptor_of(self._path), "ab", buffering=0),
            0,
            False,
        )
        for event in self._standing.values():
            self._write(event)

    def close(self) -> None:
        self._file.close()


def before(path: Path) -> Path:
    """The path of the events that came before those in `path`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def finite(value: float | None) -> float | None:
    """`value`, or None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def finite_only(value: object) -> object:
    """A value with None in the place of NaN and infinity, at any depth."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: finite_only(inner) for key, inner in value.items()}
    return [finite_only(inner) for inner in value] if isinstance(value, list | tuple) else value


def set_up_logging(
    verbose: bool,
    file: Path | None = None,
    shown: logging.Handler | None = None,
    least: int = logging.NOTSET,
) -> None:
    """Log sentences to standard error or `shown` and, with `file`, to that as well, so many a minute (`LineLimit`).

    The file has the date, the time and its distance from UTC in each line (ISO 8601), and becomes FILE.1 when it has
    `LOG_BYTES`; what that was before is gone. What libraries say goes to the file
    alone, unless `verbose`, and so does what is less grave than `least`: where it concerns people, this project says
    it in its own words.
    """
    level = logging.DEBUG if verbose else logging.INFO
    logging.captureWarnings(True)
    for variable in LIBRARIES:
        os.environ.setdefault(variable, "error")
    handlers: list[logging.Handler] = [shown or logging.StreamHandler(sys.stderr)]
    handlers[0].setLevel(least)
    if not verbose:
        handlers[0].addFilter(lambda record: record.name.partition(".")[0] in OURS)
    if file is not None:
        handlers.append(_LogFile(file, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"))
    for handler in handlers:
        handler.addFilter(LineLimit(handler))
        handler.setFormatter(_Dated())
    handlers[0].setFormatter(_OnTerminal())
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    if not verbose:  # what of it concerns a volunteer, this project says in its own words
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)


class _LogFile(RotatingFileHandler):
    """A log file without a traceback for each line that a full disk refuses: it is still on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Plain(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        # the name of a file need not be UTF-8: what is not is written as standard error writes it
        line = super().format(record).encode(errors="backslashreplace").decode()
        return line if record.levelno < logging.WARNING else line.replace("  ", "  ! ", 1)


class _Dated(_Plain):
    """Lines of a file that is read days later, perhaps on another machine: 2026-03-01T13:55:02+01:00."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="seconds")


class _OnTerminal(_Plain):
    """Lines that a terminal breaks between words, below their beginning."""

    def format(self, record: logging.LogRecord) -> str:
        return wrapped(super().format(record), sys.stderr, later=" " * 10)
