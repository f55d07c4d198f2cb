"""Counts that a node keeps of itself: the fraction of time spent computing, and things done with each peer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from protocol.ground import PeerId
from protocol.windows import window

WINDOW_SECONDS = 60.0
MARK_SECONDS = 1.0  # how finely the last minute is known
MAX_COUNTED = 1_024  # peers


class Busy:
    """The share of time spent working. `begin` and `end` enclose each piece of work; ask from any thread.

    Mutable state: busy seconds so far, when the work at hand began, and marks (time, busy seconds until then),
    about one a second and as many as the last minute needs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._start = clock()
        self._done = 0.0
        self._since: float | None = None
        self._marks = deque([(self._start, 0.0)])

    @window
    def __repr__(self) -> str:
        return f"{'idle' if self._since is None else 'busy'} | Done: {self._done:.1f} s | Marks: {self.marks}"

    @property
    def marks(self) -> int:
        """The number of moments of the last minute that are kept."""
        return len(self._marks)

    def begin(self) -> None:
        with self._lock:
            self._since = self._clock()
            self._mark(self._since)

    def end(self) -> None:
        with self._lock:
            now = self._clock()
            self._done, self._since = self._seconds(now), None
            self._mark(now)

    def seconds(self) -> float:
        """Busy seconds since the start, until now."""
        with self._lock:
            return self._seconds(self._clock())

    def fraction(self) -> float:
        """The busy fraction of the time, 0 to 1; 0 before any time has passed. Work that goes on counts until now."""
        with self._lock:
            now = self._clock()
            return _ratio(self._seconds(now), now - self._start)

    def recent_fraction(self) -> float:
        """The fraction over the last `WINDOW_SECONDS`, or since the start while that is less long ago."""
        with self._lock:
            now = self._clock()
            began = max(self._start, now - WINDOW_SECONDS)
            return _ratio(self._seconds(now) - self._seconds_at(began, now), now - began)

    def _seconds(self, now: float) -> float:
        return self._done + (now - self._since if self._since is not None else 0.0)

    def _seconds_at(self, time: float, now: float) -> float:
        """Busy seconds until `time`, between two marks or after the last one; between marks it is one line."""
        times, seconds = zip(*self._marks, (now, self._seconds(now)), strict=True)
        return float(np.interp(time, times, seconds))

    def _mark(self, now: float) -> None:
        """Keep a mark; between two more than `MARK_SECONDS` apart it was one piece of work, or none, all the time."""
        if now - self._marks[-1][0] < MARK_SECONDS:
            return
        self._marks.append((now, self._seconds(now)))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
            self._marks.popleft()


def _ratio(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


class Tally(dict[PeerId, int]):
    """Counts things by peer, for a bounded number of peers.

    Mutable state: the counts of at most `MAX_COUNTED` peers, and in `others` what those let go had together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others = 0

    @window
    def __repr__(self) -> str:
        return f"Peers: {len(self)} | Others: {self.others:,}"

    @property
    def total(self) -> int:
        return sum(self.values()) + self.others

    def note(self, peer: PeerId) -> None:
        """Count one more. Where there is no place for a new peer, the one with the least count makes room."""
        if peer not in self and len(self) >= MAX_COUNTED:
            self.others += self.pop(min(self, key=self.__getitem__))
        self[peer] = self.get(peer, 0) + 1

    def largest(self, most: int) -> dict[str, int]:
        """The peers with the largest counts, in that order."""
        return dict(sorted(self.items(), key=lambda entry: (-entry[1], entry[0]))[:most])
