"""A node's use of time while it runs: computing, or waiting and for what, in the words of `noloco trace`.

`TimeUse` is a trace that remembers the last minute and hands everything on to another one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from node.watch.spans import NOTHING, Spans, common, length, merged, without
from node.watch.trace import NO_TRACE, Trace, Track
from protocol.ground import PeerId
from protocol.rpc.frames import FrameWatch

WINDOW_SECONDS = 60.0
MOST_SPANS = 10_000  # of a kind in a minute; what comes on top takes the place of the earliest


class Idle(StrEnum):
    """Reasons for an idle compute thread: each idle instant is counted once, under the first that fits."""

    ROUND_END = "at the end of a round"
    MOVING = "bytes coming or going"
    OTHERS = "others compute"  # another process of the trace, at least one
    ON_THE_WAY = "gradients on the way"  # and nobody computes: latency
    NOTHING = "nothing to do"


def idle_shares(
    spans: Mapping[Track, npt.ArrayLike], within: Spans, others: Spans = NOTHING
) -> dict[Idle, float]:
    """Fractions of the time `within`, a single span, in which nothing is computed; `others`: when others compute."""
    idle, seconds = common(without(merged(spans[Track.COMPUTE])), within), length(within)
    causes = {
        Idle.ROUND_END: merged(spans[Track.ROUND_END]),
        Idle.MOVING: merged(np.vstack([merged(spans[Track.SEND]), merged(spans[Track.RECEIVE])])),
        Idle.OTHERS: others,
        Idle.ON_THE_WAY: merged(spans[Track.GRADIENT]),
    }
    shares = {}
    for cause, when in causes.items():
        shares[cause] = length(common(idle, when)) / seconds
        idle = common(idle, without(when))
    return shares | {Idle.NOTHING: length(idle) / seconds}


class TimeUse(Trace):
    """Accounts for a node's time over the last minute: computing, or waiting and for what.

    Mutable state: the spans of the last minute, from any thread, the bytes of frames, and what has begun.
    """

    def __init__(self, inner: Trace = NO_TRACE, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._spans = defaultdict[Track, deque[tuple[float, float]]](lambda: deque(maxlen=MOST_SPANS))
        self._bytes = {track: deque[int](maxlen=MOST_SPANS) for track in (Track.SEND, Track.RECEIVE)}
        self._open: dict[int, float] = {}  # gradients that are waited for
        self._inner_numbers: dict[int, int] = {}
        self._last = 0

    # --- as a trace -----------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    def name_process(self, name: str) -> None:
        self._inner.name_process(name)

    def complete(self, track: Track, name: str, began: float, ended: float, **args: object) -> None:
        self._inner.complete(track, name, began, ended, **args)
        with self._lock:
            self._spans[track].append((began, ended))

    def async_begin(self, track: Track, name: str, **args: object) -> int:
        inner = self._inner.async_begin(track, name, **args)
        with self._lock:
            self._last += 1
            self._inner_numbers[self._last] = inner
            if track == Track.GRADIENT:
                self._open[self._last] = self._clock()
            return self._last

    def async_end(self, track: Track, name: str, number: int, **args: object) -> None:
        with self._lock:
            inner, began = self._inner_numbers.pop(number), self._open.pop(number, None)
            if began is not None:
                self._spans[track].append((began, self._clock()))
        self._inner.async_end(track, name, inner, **args)

    def frames(self) -> FrameWatch:
        return CountedFrames(self, self._inner.frames())

    def close(self) -> None:
        self._inner.close()

    # --- what is asked of it --------------------------------------------------------------------

    def moved(self, track: Track, nbytes: int, began: float) -> None:
        """Note that a frame of so many bytes was sent or received, from `began` until now."""
        with self._lock:
            self._spans[track].append((began, self._clock()))
            self._bytes[track].append(nbytes)

    def idle(self) -> dict[Idle, float]:
        """Shares of the last minute; nobody knows here what others compute."""
        with self._lock:
            now = self._clock()
            spans = defaultdict(list, {track: list(each) for track, each in self._spans.items()})
            spans[Track.GRADIENT] += [(began, now) for began in self._open.values()]
        return idle_shares(spans, np.array([[self._since(now), now + 1e-9]]))

    def bytes_per_second(self, track: Track) -> float:
        """Bytes per second of the frames in the last minute; one that took long counts by the part of it in that
        minute.
        """
        with self._lock:
            now, spans, sizes = self._clock(), list(self._spans[track]), list(self._bytes[track])
        since = self._since(now)
        return _within(spans, sizes, since) / (now - since) if now > since else 0.0

    def _since(self, now: float) -> float:
        return max(self._began, now - WINDOW_SECONDS)


def _within(spans: Sequence[tuple[float, float]], sizes: Sequence[int], since: float) -> float:
    """Bytes moved after `since`."""
    if not spans:
        return 0.0
    began, ended = np.array(spans).T
    shares = (ended - np.clip(since, began, ended)) / np.maximum(ended - began, 1e-9)
    return float((np.where(began >= since, 1.0, shares) * np.array(sizes)).sum())


class CountedFrames(FrameWatch):
    """Hands each frame's bytes and times to `TimeUse` and to the watch of another trace."""

    def __init__(self, use: TimeUse, inner: FrameWatch) -> None:
        self._use = use
        self._inner = inner

    def now(self) -> float:
        return self._use.now()

    def sent(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        self._inner.sent(traffic, peer, kind, nbytes, began)
        self._use.moved(Track.SEND, nbytes, began)

    def received(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        self._inner.received(traffic, peer, kind, nbytes, began)
        self._use.moved(Track.RECEIVE, nbytes, began)
