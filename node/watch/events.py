"""Two records of a node's life: a log of sentences for the volunteer, and one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("noloco")


class Events:
    """The structured event stream. `clock` gives the wall time in seconds; `sink` takes each event."""

    def __init__(self, clock: Callable[[], float], sink: Callable[[dict[str, object]], None]) -> None:
        self._clock = clock
        self._sink = sink

    def emit(self, event: str, **fields: object) -> None:
        finite_fields = {name: finite_only(value) for name, value in fields.items()}
        self._sink({"time": round(self._clock(), 6), "event": event, **finite_fields})

    def say(self, sentence: str, event: str, **fields: object) -> None:
        """Tell the volunteer and record the event."""
        logger.info(sentence)
        self.emit(event, **fields)

    def warn(self, sentence: str, event: str, **fields: object) -> None:
        logger.warning(sentence)
        self.emit(event, **fields)


class JsonLines:
    """Appends events to a file, one JSON object a line; a crash costs the last line at most.

    Mutable state: the file, what was wrong with the last write, and whether it left half a line there. What cannot be
    written is dropped: a full disk stops no training.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._problem = ""
        self._is_torn = False

    def __call__(self, event: dict[str, object]) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        try:
            self._is_torn = self._file.write(line) < len(line)
        except OSError as error:
            if not self._problem:
                self._problem = error.strerror or str(error)
                told = "Cannot write to %s (%s); training goes on without a record. Free some disk space."
                logger.warning(told, self._path, self._problem)
        else:
            self._problem = ""

    def close(self) -> None:
        self._file.close()


def finite(value: float | None) -> float | None:
    """`value`, or None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def finite_only(value: object) -> object:
    """The same with None in the place of NaN and infinity, at any depth."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: finite_only(inner) for key, inner in value.items()}
    return [finite_only(inner) for inner in value] if isinstance(value, list | tuple) else value


def set_up_logging(verbose: bool, file: Path | None = None) -> None:
    """Log sentences to standard error and, with `file`, to that as well."""
    level = logging.DEBUG if verbose else logging.INFO
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(_LogFile(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for name in ("noloco", "node", "protocol", "bootstrap"):
        logging.getLogger(name).setLevel(level)
    if not verbose:  # what of it concerns a volunteer, this project says in its own words
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)


class _LogFile(logging.FileHandler):
    """What does not go into a file on a full disk is still on the terminal, without a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Plain(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if record.levelno < logging.WARNING else line.replace("  ", "  ! ", 1)
