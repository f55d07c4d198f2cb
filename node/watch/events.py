"""Two records of a node's life: sentences for the volunteer, and one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger("noloco")


def numbers(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON has no word for, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: numbers(inner) for key, inner in value.items()}
    return [numbers(inner) for inner in value] if isinstance(value, list | tuple) else value


class Events:
    """The structured event stream. `clock` gives the wall time in seconds; `sink` takes each event."""

    def __init__(self, clock: Callable[[], float], sink: Callable[[dict[str, Any]], None]) -> None:
        self._clock = clock
        self._sink = sink

    def emit(self, event: str, **fields: Any) -> None:
        self._sink({"time": round(self._clock(), 6), "event": event, **numbers(fields)})

    def say(self, sentence: str, event: str, **fields: Any) -> None:
        """Tell the volunteer and record the event."""
        logger.info(sentence)
        self.emit(event, **fields)

    def warn(self, sentence: str, event: str, **fields: Any) -> None:
        logger.warning(sentence)
        self.emit(event, **fields)


class JsonLines:
    """Appends events to a file, one JSON object a line; a crash costs the last line at most."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()
