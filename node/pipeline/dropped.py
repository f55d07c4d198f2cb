"""Microbatches that were dropped for their content: how long to wait before another one is drawn, and when to say so.

Pure; clock passed in.
"""

from __future__ import annotations

FIRST_PAUSE = 0.1  # seconds before another one is drawn, doubling while nothing gets through
LONGEST_PAUSE = 10.0
TOLD_SECONDS = 60.0


class Dropped:
    """Mutable state: how many in a row, how many since people were told, and when that was."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._untold = 0
        self._told = float("-inf")

    def note(self) -> float:
        """Another one; returns the seconds to wait before the next is drawn."""
        self._untold += 1
        self._in_a_row += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._in_a_row - 1, 10))

    def went_through(self) -> None:
        self._in_a_row = 0

    def to_tell(self, now: float) -> int:
        """How many to tell of now, at loop time `now`; 0 when it is too soon."""
        if now - self._told < TOLD_SECONDS:
            return 0
        self._told, count = now, self._untold
        self._untold = 0
        return count
