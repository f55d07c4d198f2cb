"""What a node's line to the network carries: this month, at present, and at most."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

from node.storage.state_directory import StateDirectory
from protocol.transport.base import Transport

LOOKS = 2  # the present rate is measured since the last but one, seconds ago
LEAST_SECONDS = 2.0  # between two of them
QUIET = 32_000.0  # bytes per second either way outside of the network hours: records and questions, no bulk


class Line:
    """Counts and limits the bytes of a node, over all of its lives in the present month.

    Mutable state: which month it is, the bytes of earlier lives, what the transport had moved when this one began and
    at the last looks, and the limits.
    """

    def __init__(
        self,
        state: StateDirectory,
        transport: Transport,
        now: datetime,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is local time; `clock` measures rates, in seconds."""
        self._state = state
        self._transport = transport
        self._clock = clock
        self._name, facts = f"{now:%Y-%m}", state.facts()
        saved = facts.get("month_bytes") if facts.get("month") == self._name else 0
        self._saved = saved if isinstance(saved, int) and 0 <= saved < 2**63 else 0
        self._began = 0
        self._looks = deque([(clock(), transport.moved())], LOOKS)
        self._limits: tuple[float, float] | None = None

    def moved(self, now: datetime) -> int:
        """Bytes of this month, both ways together."""
        total = sum(self._transport.moved())
        if self._name != (name := f"{now:%Y-%m}"):
            self._name, self._saved, self._began = name, 0, total
        return self._saved + total - self._began

    def save(self, now: datetime) -> None:
        """Keep the month's bytes for the next life."""
        self._state.remember(month=f"{now:%Y-%m}", month_bytes=self.moved(now))

    def look(self) -> None:
        """Note what has been moved by now; called every few seconds."""
        if self._clock() - self._looks[-1][0] >= LEAST_SECONDS:
            self._looks.append((self._clock(), self._transport.moved()))

    def rates(self) -> tuple[float, float]:
        """Bytes per second sent and received, over the last seconds."""
        (then, before), now, after = self._looks[0], self._clock(), self._transport.moved()
        seconds = max(now - then, 1e-3)
        return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds

    def limit(self, upload: float, download: float, *, is_quiet: bool) -> None:
        """Stay below so many bytes per second, 0 being no limit; far below while it is to be quiet."""
        limits = (
            (min(upload or QUIET, QUIET), min(download or QUIET, QUIET)) if is_quiet else (upload, download)
        )
        if limits != self._limits:
            self._limits = limits
            self._transport.limit(*limits)
