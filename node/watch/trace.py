"""A trace of a node's time, as a file that ui.perfetto.dev and chrome://tracing show: Chrome's trace-event format.

The file is a JSON array with one event on a line, written about once a second by a thread of its own. The format
lets the closing bracket be missing, so that the trace of a killed node loads as well. Without a trace, `NO_TRACE`
takes its place and records nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from protocol.errors import StateError
from protocol.files.keeping import advice_for, descriptor_of
from protocol.ground import PeerId
from protocol.rpc.frames import FrameWatch
from protocol.windows import amount, window

logger = logging.getLogger("noloco")

FLUSH_SECONDS = 1.0
FLUSH_EVENTS = 2_000  # as many are written at once without waiting for the second to pass
WRITTEN_AT_ONCE = 200
MOST_PENDING = 20_000  # about 10 MB; what comes on top while the disk hangs is counted, not kept
MOST_BYTES = 2**30  # browsers open hardly more than that
CLOSE_SECONDS = 5.0  # for a disk that hangs while the node leaves

Event: TypeAlias = dict[str, object]


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


class Trace:
    """Records nothing: what every part gets unless a trace was asked for."""

    def now(self) -> float:
        """Seconds of the trace's clock."""
        return 0.0

    def name_process(self, name: str) -> None:
        """Name the process in the picture."""

    def complete(self, track: Track, name: str, began: float, ended: float, **args: object) -> None:
        """Record something that took from `began` to `ended` on the trace's clock. From any thread."""

    @contextmanager
    def span(self, track: Track, name: str, **args: object) -> Iterator[None]:
        """A span for what is done within a `with`."""
        began = self.now()
        try:
            yield
        finally:
            self.complete(track, name, began, self.now(), **args)

    def async_begin(self, track: Track, name: str, **args: object) -> int:
        """Begin one of many things of a kind that go on at once. Returns a number for `async_end`."""
        return 0

    def async_end(self, track: Track, name: str, number: int, **args: object) -> None:
        """End what `async_begin` began."""

    @contextmanager
    def waiting(self, track: Track, name: str, **args: object) -> Iterator[None]:
        """`async_begin` and `async_end` around what is done within a `with`."""
        number = self.async_begin(track, name, **args)
        try:
            yield
        finally:
            self.async_end(track, name, number, **args)

    def frames(self) -> FrameWatch:
        """A watch that records the frames that the network moves."""
        return FrameWatch()

    def close(self) -> None:
        """Write the remaining events and end."""


NO_TRACE = Trace()


class TraceFile(Trace):
    """Writes spans to a trace file in Chrome's format from a thread of its own.

    Mutable state: events not yet written, the rows so far, and the file, which its own thread writes.

    Raises `StateError` when the file cannot be written from the start. When it cannot be later, the volunteer is
    told once and tracing ends; training goes on.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: list[Event] = []
        self._lost = 0
        self._rows: dict[str, int] = {}
        self._row_ends: dict[Track, list[float]] = {track: [] for track in OVERLAPPING}
        self._numbers = itertools.count(1)
        self._bytes = 0
        self._recording = True
        self._process = os.getpid()
        try:
            self._file = os.fdopen(descriptor_of(path, is_fresh=True), "wb", buffering=0)
        except OSError as error:
            raise _unusable(path, error) from None
        self.name_process("noloco-node")
        try:
            self._append(b"[\n" + _lines(self._take()))  # finds a full disk
        except OSError as error:
            self._file.close()
            raise _unusable(path, error) from None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._writer = threading.Thread(target=self._write, name="trace", daemon=True)
        self._writer.start()

    @window
    def __repr__(self) -> str:
        events = f"{self.pending} pending, {self._lost} lost"
        state = "recording" if self._recording else "ended"
        return f"{self._path} | {state} | Events: {events} | Written: {amount(self._bytes)}"

    @property
    def pending(self) -> int:
        """Events that are not in the file yet."""
        return len(self._pending)

    def now(self) -> float:
        return self._clock()

    def name_process(self, name: str) -> None:
        named: Event = {"ph": "M", "name": "process_name", "pid": self._process, "args": {"name": name}}
        with self._lock:
            self._add_locked(named)

    def complete(self, track: Track, name: str, began: float, ended: float, **args: object) -> None:
        if not self._recording:
            return
        with self._lock:
            row = self._row(self._free_row(track, began, ended) if track in OVERLAPPING else track)
            duration = _microseconds(ended) - _microseconds(began)
            self._add_locked(self._event("X", name, row, began, cat=track, args=args, dur=duration))

    def async_begin(self, track: Track, name: str, **args: object) -> int:
        number = next(self._numbers)
        self._add_half("b", track, name, number, args)
        return number

    def async_end(self, track: Track, name: str, number: int, **args: object) -> None:
        self._add_half("e", track, name, number, args)

    def frames(self) -> FrameWatch:
        return TracedFrames(self)

    def close(self) -> None:
        self._ending.set()
        self._wake.set()
        self._writer.join(CLOSE_SECONDS)

    # --- events -------------------------------------------------------------------------------

    def _add_half(self, phase: str, track: Track, name: str, number: int, args: Event) -> None:
        unique = f"{self._process:x}.{number:x}"  # of this process alone, also in a merged file
        with self._lock:
            row = self._row(track)
            self._add_locked(self._event(phase, name, row, self._clock(), cat=track, id=unique, args=args))

    def _event(self, phase: str, name: str, row: int, time: float, **more: object) -> Event:
        at = {"pid": self._process, "tid": row, "ts": _microseconds(time)}
        return {"ph": phase, "name": name, **at, **more}

    def _free_row(self, track: Track, began: float, ended: float) -> str:
        """The first row of the track where nothing ended after `began`; events come in the order of their ends."""
        ends = self._row_ends[track]
        number = next((number for number, end in enumerate(ends) if end <= began), len(ends))
        ends[number : number + 1] = [ended]
        return f"{track} {number + 1}" if number else track

    def _row(self, name: str) -> int:
        """The number of a row; a new one is announced, so that it is shown by its name."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            announced = {"ph": "M", "pid": self._process, "tid": row}
            self._add_locked({**announced, "name": "thread_name", "args": {"name": name}})
            place = list(Track).index(next(track for track in Track if name.startswith(track)))
            self._add_locked({**announced, "name": "thread_sort_index", "args": {"sort_index": place}})
        return row

    def _add_locked(self, event: Event) -> None:
        if not self._recording:
            return
        if len(self._pending) >= MOST_PENDING and event["ph"] != "M":
            self._lost += 1
            return
        self._pending.append(event)
        if len(self._pending) == FLUSH_EVENTS:
            self._wake.set()

    # --- the file -----------------------------------------------------------------------------

    def _write(self) -> None:
        """Write events to the file until the trace ends; run by the writer's thread."""
        try:
            while not self._ending.is_set():
                self._wake.wait(FLUSH_SECONDS)
                self._wake.clear()
                self._flush()
                if self._bytes > MOST_BYTES:
                    self._give_up(f"has reached {MOST_BYTES >> 20} MiB")
                    break
            self._recording = False
            self._flush()
            self._append(b"\n]\n")
        except OSError as error:
            self._give_up(f"cannot be written any more ({error.strerror})")
        finally:
            self._file.close()

    def _flush(self) -> None:
        events = self._take()
        for first in range(0, len(events), WRITTEN_AT_ONCE):
            self._append(b",\n" + _lines(events[first : first + WRITTEN_AT_ONCE]))

    def _take(self) -> list[Event]:
        with self._lock:
            events, self._pending = self._pending, []
            if self._lost:
                told = f"{self._lost} events lost: the disk was too slow"
                events.append(self._event("i", told, 0, self._clock(), s="p"))
                self._lost = 0
        return events

    def _append(self, contents: bytes) -> None:
        """Write all of it or nothing: a disk that fills must not leave half an event behind."""
        written = self._file.write(contents)
        while written is not None and written < len(contents):
            try:
                written += self._file.write(contents[written:]) or 0
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._bytes)
                raise
        self._bytes += len(contents)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._recording = False
            self._pending.clear()
        told = "The trace %s %s. Tracing has ended, training goes on; what was written can be opened."
        logger.warning(told, self._path, reason)


class TracedFrames(FrameWatch):
    """Records each frame that is written or read, as an event of the network's rows."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def now(self) -> float:
        return self._trace.now()

    def sent(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        self._moved(Track.SEND, traffic, peer, kind, nbytes, began)

    def received(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        self._moved(Track.RECEIVE, traffic, peer, kind, nbytes, began)

    def _moved(self, track: Track, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        args = {"traffic": traffic, "peer": peer[-8:], "bytes": nbytes}
        self._trace.complete(track, f"{traffic}: {kind}"[:64], began, self._trace.now(), **args)


def _microseconds(seconds: float) -> int:
    """Whole microseconds: one event's end and the next one's beginning then compare exactly."""
    return int(seconds * 1e6)


def _lines(events: list[Event]) -> bytes:
    return b",\n".join(
        json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")
        for event in events
    )


def _unusable(path: Path, error: OSError) -> StateError:
    advice = advice_for(error, "Make sure that its folder exists and is yours")
    return StateError(
        f"Cannot write the trace {path} ({error.strerror}). {advice}, or choose another file with --trace."
    )
