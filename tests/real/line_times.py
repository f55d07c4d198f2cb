"""When lines of a program came, on a clock that its own stamps, of whole seconds, are not."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType

LOOK_SECONDS = 0.02


class LineTimes:
    """Mutable state: the lines of a growing file so far, each with its seconds since the block began.

    To be begun just before the program, so that the wait for the first line counts.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.lines: list[tuple[float, str]] = []

    def __enter__(self) -> LineTimes:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        part, place = b"", 0
        while not self._ended.wait(LOOK_SECONDS):
            if not self._log.exists():
                continue
            with self._log.open("rb") as log:
                log.seek(place)
                part += log.read()
                place = log.tell()
            *whole, part = part.split(b"\n")
            at = time.monotonic() - self._began
            self.lines += [(at, line.decode(errors="replace")) for line in whole]

    def longest_gap(self, until: str) -> tuple[float, str]:
        """The longest time without a line, from the beginning to the first with `until`; and what ended it."""
        gaps, before = list[tuple[float, str]](), 0.0
        for at, line in self.lines:
            gaps.append((at - before, line))
            if until in line:
                return max(gaps)
            before = at
        raise AssertionError(f"{until!r} was not said in:\n{self}")

    def __str__(self) -> str:
        times = [0.0, *(at for at, _ in self.lines)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return "\n".join(
            f"{at:6.1f} (+{gap:4.1f}) {line}" for (at, line), gap in zip(self.lines, gaps, strict=True)
        )
