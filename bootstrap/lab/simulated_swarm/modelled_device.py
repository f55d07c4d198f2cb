"""A peer's device: one piece of work at a time, backward passes first, and what it waits for otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from bootstrap.lab.simulated_swarm.event_queue import EventQueue
from bootstrap.lab.simulated_swarm.swarm_measures import SwarmMeasures

FORWARD_SHARE = 1 / 3  # of a microbatch's time


class ModelledDevice:
    """A simulated peer's device, which does one piece of work at a time.

    Mutable state: the work that waits, and since when it is idle and why.
    """

    def __init__(
        self, queue: EventQueue, speed: float, measures: SwarmMeasures, why_idle: Callable[[], str]
    ) -> None:
        """`speed` in microbatches per second; `why_idle` is asked when the work runs out."""
        self._queue = queue
        self._measures = measures
        self._why_idle = why_idle
        self._seconds = 1 / speed
        self._waiting: tuple[deque[tuple[float, Callable[..., Any], Any]], ...] = (deque(), deque())
        self._is_busy = False
        self._idle_since = queue.now
        self._cause = "joining"
        self.busy_seconds = 0.0
        self.microbatches = 0

    def forward(self, done: Callable[..., Any], work: object) -> None:
        self._add(1, FORWARD_SHARE, done, work)

    def backward(self, done: Callable[..., Any], work: object) -> None:
        self._add(0, 1 - FORWARD_SHARE, done, work)

    def both(self, done: Callable[..., Any], work: object) -> None:
        """Compute forward and backward at once, at the last stage."""
        self._add(1, 1.0, done, work)

    def _add(self, priority: int, share: float, done: Callable[..., Any], work: object) -> None:
        self._waiting[priority].append((share * self._seconds, done, work))
        if not self._is_busy:
            self._is_busy = True
            self.note_idle()
            self._next()

    def _next(self) -> None:
        urgent, other = self._waiting
        seconds, done, work = (urgent or other).popleft()
        self._queue.after(seconds, self._done, seconds, done, work)

    def _done(self, seconds: float, done: Callable[..., Any], work: object) -> None:
        self.busy_seconds += seconds
        if self._measures.counts:
            self._measures.computing += seconds
        done(work)
        if self._waiting[0] or self._waiting[1]:
            self._next()
            return
        self._is_busy = False
        self._idle_since, self._cause = self._queue.now, self._why_idle()

    def note_idle(self) -> None:
        """Add the idle time so far to its cause."""
        now = self._queue.now
        if self._measures.counts:
            self._measures.idle[self._cause] += now - max(self._idle_since, self._measures.warm_up)
        self._idle_since = now

    def note_idle_at_end(self) -> None:
        """Add the idle time so far when the simulation is over."""
        if not self._is_busy:
            self.note_idle()

    def stop(self) -> None:
        """Drop what waits: the device is gone."""
        self.note_idle_at_end()
        for waiting in self._waiting:
            waiting.clear()
