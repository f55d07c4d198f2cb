"""What a trace is told: where a node's time goes. `trace_file` writes it; without one nothing is kept."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

from protocol.frames import FrameWatch


class Track(StrEnum):
    """A row of the picture. Events of a row must nest or follow one another, unless the row is in `OVERLAPPING`."""

    COMPUTE = "compute thread"
    ROUNDS = "rounds"
    ROUND_END = "end of a round"  # training stands still
    SEND = "send"
    RECEIVE = "receive"
    GATE = "gate"  # asynchronous events, many at once: a viewer lays them out by itself
    GRADIENT = "gradient"


OVERLAPPING = frozenset({Track.SEND, Track.RECEIVE})  # get as many rows as there are events at once

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Trace:
    """The one that records nothing: what every part has unless a trace was asked for."""

    def now(self) -> float:
        """Seconds of the trace's clock."""
        return 0.0

    def name_process(self, name: str) -> None:
        """What the process is called in the picture."""

    def complete(self, track: Track, name: str, began: float, ended: float, **args: Any) -> None:
        """Something that took from `began` to `ended` on the trace's clock. From any thread."""

    def span(self, track: Track, name: str, **args: Any) -> AbstractContextManager[None]:
        """The same for what is done within a `with`."""
        return _NOTHING

    def async_begin(self, track: Track, name: str, **args: Any) -> int:
        """One of many things of a kind that go on at once. Returns a number for `async_end`."""
        return 0

    def async_end(self, track: Track, name: str, number: int, **args: Any) -> None:
        """It is over."""

    def waiting(self, track: Track, name: str, **args: Any) -> AbstractContextManager[None]:
        """`async_begin` and `async_end` around what is done within a `with`."""
        return _NOTHING

    def frames(self) -> FrameWatch:
        """Who is told of the frames that the network moves."""
        return FrameWatch()

    def close(self) -> None:
        """Write what is left."""


NO_TRACE = Trace()
