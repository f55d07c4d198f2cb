"""Moments kept of a run that goes on for weeks: so many at most, evenly spaced over all of it."""

from __future__ import annotations

from typing import Generic, TypeVar

from protocol.windows import window

T = TypeVar("T")


class Thinned(Generic[T]):
    """Moments in the order of their times. When there are too many, every second one goes, and from then on moments
    are taken half as often.

    Mutable state: the moments, and the least seconds between two of them.
    """

    def __init__(self, most: int, interval: float = 0.0) -> None:
        """`most` moments, at least two; the first ones `interval` seconds apart or more."""
        self._most = max(2, most)
        self._interval = interval
        self._kept: list[tuple[float, T]] = []

    @window
    def __repr__(self) -> str:
        return f"Moments: {len(self._kept)} of {self._most} | Every: {self._interval:g} s"

    @property
    def interval(self) -> float:
        return self._interval

    def is_due(self, time: float) -> bool:
        """Return whether a moment at `time` would be kept. One before the last never is: clocks are set back."""
        return not self._kept or time >= self._kept[-1][0] + max(self._interval, 1e-9)

    def add(self, time: float, moment: T) -> bool:
        """Keep a moment if it is due; return whether it was."""
        if not self.is_due(time):
            return False
        self._kept.append((time, moment))
        if len(self._kept) > self._most:
            del self._kept[1::2]
            span = self._kept[-1][0] - self._kept[0][0]
            self._interval = max(2 * self._interval, span / (len(self._kept) - 1))
        return True

    def all(self) -> list[tuple[float, T]]:
        """A copy of the moments, oldest first."""
        return list(self._kept)

    def at(self, time: float) -> tuple[float, T] | None:
        """The last one at or before `time`, else the first; None when there is none."""
        before = [entry for entry in self._kept if entry[0] <= time]
        return before[-1] if before else (self._kept[0] if self._kept else None)

    def __len__(self) -> int:
        return len(self._kept)
