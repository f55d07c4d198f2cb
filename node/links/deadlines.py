"""How long to wait for a peer, learned from how long peers took. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

HISTORY = 32
ENOUGH = 5  # measurements before they count for more than the manifest's starting point


class AdaptiveDeadline:
    """Median plus a generous multiple of the spread of past durations, never above the manifest's limit.

    Mutable state: the last `HISTORY` durations in seconds. A deadline that was missed enters as twice itself,
    so that deadlines grow again when the network slows down.
    """

    def __init__(self, limit: float, least: float) -> None:
        self._limit = limit
        self._least = least
        self._durations: deque[float] = deque(maxlen=HISTORY)

    def note(self, seconds: float) -> None:
        self._durations.append(seconds)

    def note_missed(self) -> None:
        self._durations.append(min(self._limit, 2 * self.seconds()))

    def seconds(self) -> float:
        if len(self._durations) < ENOUGH:
            return self._limit
        middle = median(self._durations)
        spread = median(abs(duration - middle) for duration in self._durations)
        return min(self._limit, max(self._least, 3 * middle + 10 * spread))
