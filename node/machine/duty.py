"""The share of the time in which a device may compute."""

from __future__ import annotations

CREDIT_SECONDS = 0.2  # of idle time before a piece of work count as rest


class Duty:
    """Keeps a device's share of computing time at what was set, by resting after each piece of work.

    Mutable state: the share of the time that may be computed in, above 0 and at most 1, and when what was computed
    has been rested for. One thread works by it, others set the share.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._rested_at = float("-inf")

    def rest(self, began: float, ended: float) -> float:
        """Seconds to rest after a piece of work between these times, by any one clock."""
        if self.share >= 1.0:
            return 0.0
        self._rested_at = max(self._rested_at, began - CREDIT_SECONDS) + (ended - began) / self.share
        return max(0.0, self._rested_at - ended)
