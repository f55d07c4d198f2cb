"""The virtual clock: what happens next, in the order of time and, at one moment, of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """The events of a simulation in the order of their virtual times.

    Mutable state: the time in seconds, and the events to come.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.counted = 0
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., Any], *arguments: Any) -> None:
        self.counted += 1
        heapq.heappush(self._events, (time, self.counted, action, arguments))

    def after(self, seconds: float, action: Callable[..., Any], *arguments: Any) -> None:
        self.counted += 1
        heapq.heappush(self._events, (self.now + seconds, self.counted, action, arguments))

    def clock(self) -> float:
        return self.now

    def run_until(self, end: float) -> None:
        """Run all events up to `end` in seconds, which is then the time."""
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(events)
            action(*arguments)
        self.now = end
