"""The share of the time in which a device may compute."""

from __future__ import annotations

CREDIT_SECONDS = 0.2  # of idle time before a piece of work count as rest


class Duty:
    """Keeps a device's share of computing time at what was set, by resting after each piece of work.

    Mutable state: the share of the time that may be computed in, above 0 and at most 1, and when what was computed
    has been rested for, at which share. One thread works by it, others set the share.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._rested_at = float("-inf")
        self._rests_for = share

    def rest(self, began: float, ended: float) -> float:
        """Seconds to rest after a piece of work between these times, by any one clock."""
        share, before = self.share, self._rests_for
        self._rests_for = share
        if share > before:  # what was owed for less is forgiven
            self._rested_at = float("-inf")
        if share >= 1.0:
            return 0.0
        self._rested_at = max(self._rested_at, began - CREDIT_SECONDS) + (ended - began) / share
        return max(0.0, self._rested_at - ended)

    def has_risen(self) -> bool:
        """True if the share is larger than what the present rest is for: then it is over."""
        return self.share > self._rests_for
