"""Two records of a node's life: sentences for the volunteer, and one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.watch.finite import finite_only

logger = logging.getLogger("noloco")


class Events:
    """The structured event stream. `clock` gives the wall time in seconds; `sink` takes each event."""

    def __init__(self, clock: Callable[[], float], sink: Callable[[dict[str, Any]], None]) -> None:
        self._clock = clock
        self._sink = sink

    def emit(self, event: str, **fields: Any) -> None:
        self._sink({"time": round(self._clock(), 6), "event": event, **finite_only(fields)})

    def say(self, sentence: str, event: str, **fields: Any) -> None:
        """Tell the volunteer and record the event."""
        logger.info(sentence)
        self.emit(event, **fields)

    def warn(self, sentence: str, event: str, **fields: Any) -> None:
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

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        try:
            self._is_torn = self._file.write(line) < len(line)
        except OSError as error:
            if not self._problem:
                self._problem = error.strerror or str(error)
                logger.warning(
                    "Cannot write to %s (%s); training goes on without a record. Free some disk space.",
                    self._path,
                    self._problem,
                )
        else:
            self._problem = ""

    def close(self) -> None:
        self._file.close()
