"""Byte streams between two peers of an in-memory network, and the uplink that a peer's streams share."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bootstrap.lab.in_memory.memory_link import Faults, Link
from protocol.errors import PeerUnreachable
from protocol.ground import Buffer, PeerId
from protocol.transport.base import Stream
from protocol.windows import amount, short, window

Chunk = bytes | memoryview  # never changes once it is in a pipe; b"" is the end of the stream
END = b""


@dataclass(frozen=True)
class StreamLimits:
    """Limits on what a stream may hold, in bytes."""

    window: int = 4 << 20  # a writer waits while more than this is under way or unread
    chunk: int = 256 << 10  # the uplink turns to another stream after this much


class Uplink:
    """A peer's sending side: the chunks of all its streams leave one after another, stream by stream in turn.

    So a small message waits behind one chunk of each bulk transfer, not behind whole transfers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._free_at = -math.inf
        self._turns: deque[Pipe] = deque()

    def enqueue(self, pipe: Pipe) -> None:
        """Queue `pipe` for its turn; called when its first chunk begins to wait."""
        self._turns.append(pipe)
        if len(self._turns) == 1:
            if self._free_at <= self._loop.time():
                self._next()
            else:
                self._loop.call_at(self._free_at, self._next)

    def _next(self) -> None:
        while self._turns:
            pipe = self._turns.popleft()
            if not pipe.waiting():  # its stream broke meanwhile
                continue
            duration = pipe.transmit()
            if pipe.waiting():
                self._turns.append(pipe)
            if duration > 0:
                self._free_at = self._loop.time() + duration
                if self._turns:
                    self._loop.call_at(self._free_at, self._next)
                return


class Pipe:
    """One direction of a stream: the sender's queue, the chunks on the wire, the receiver's buffer."""

    def __init__(
        self, sender: PeerId, receiver: PeerId, link: Link, uplink: Uplink, faults: Faults, rng: Random
    ) -> None:
        self.link = link
        self.broken = False
        self.heard = 0.0  # the loop's time at which bytes last arrived
        self.ended = False  # the sender closed, and everything it wrote has arrived
        self._ends = (sender, receiver)
        self._uplink, self._faults, self._rng = uplink, faults, rng
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Chunk] = deque()  # waiting for the uplink
        self._wire: deque[tuple[float, Chunk]] = deque()  # (time of arrival, chunk), in order
        self._last_arrival = 0.0
        self._timer: asyncio.TimerHandle | None = None  # for the first chunk on the wire
        self._held = False  # the first chunk on the wire waits for a fault to end
        self._under_way = 0  # bytes in the queue and on the wire
        self._buffer: deque[Chunk] = deque()  # arrived, unread
        self._unread = 0  # bytes in the buffer
        self._wanted = 0  # bytes that a reader waits for now
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()

    @window
    def __repr__(self) -> str:
        (sender, receiver), state = map(short, self._ends), "broken" if self.broken else "whole"
        bytes_ = f"{amount(self._under_way)} under way, {amount(self._unread)} unread"
        return f"{sender} → {receiver}, {state} | {bytes_}"

    # --- the sender's side

    def full(self, window: int) -> bool:
        """Return whether the window is full. What a reader waits for does not count, or a larger read would hang."""
        return self._under_way + max(0, self._unread - self._wanted) >= window

    def put(self, chunk: Chunk) -> None:
        self._queue.append(chunk)
        self._under_way += len(chunk)
        if len(self._queue) == 1:
            self._uplink.enqueue(self)

    async def room(self) -> None:
        """Wait until the receiver took something or the pipe broke."""
        future = self._loop.create_future()
        self._writers.append(future)
        await future

    def waiting(self) -> bool:
        """True if another chunk waits for the uplink."""
        return bool(self._queue)

    def transmit(self) -> float:
        """Send the next chunk now; returns the seconds that the uplink is busy with it."""
        chunk = self._queue.popleft()
        duration = self.link.seconds(len(chunk))
        delay = self.link.latency + (self._rng.random() * self.link.jitter if self.link.jitter else 0.0)
        self._last_arrival = max(self._last_arrival, self._loop.time() + duration + delay)
        self._wire.append((self._last_arrival, chunk))
        if self._timer is None and not self._held:
            self._arrive()
        return duration

    # --- the receiver's side

    def _arrive(self) -> None:
        """Deliver what is due; called by the timer, and by the faults when one of them ended."""
        self._timer = None
        self._held = False
        now = self._loop.time()
        while self._wire and not self.broken:
            due, chunk = self._wire[0]
            if due > now:
                self._timer = self._loop.call_at(due, self._arrive)
                return
            if self._faults.between(*self._ends):
                self._held = True
                self._faults.call_when_changed(self._arrive)
                return
            self._wire.popleft()
            self._deliver(chunk)

    def _deliver(self, chunk: Chunk) -> None:
        if not chunk:
            self.ended = True
        else:
            self._under_way -= len(chunk)
            self._unread += len(chunk)
            self._buffer.append(chunk)
            self.heard = self._loop.time()
        if self.ended or self._unread >= self._wanted:
            _wake(self._reader)
        if self._writers:
            self.wake_writers()

    async def get(self, size: int) -> bytes:
        """Exactly `size` bytes, or `PeerUnreachable` when they cannot come. A cancelled call takes nothing."""
        if self._reader is not None:
            raise RuntimeError("another task reads from this stream already")
        if self._unread < size:
            await self._arrival_of(size)
        if self.broken:
            raise PeerUnreachable("the stream broke")
        return self._take(size)

    async def _arrival_of(self, size: int) -> None:
        self._wanted = size
        self.wake_writers()
        try:
            while self._unread < size:
                if self.broken or self.ended:
                    raise PeerUnreachable("the stream ended before all of the data came")
                self._reader = self._loop.create_future()
                await self._reader
        finally:
            self._wanted = 0
            self._reader = None

    def _take(self, size: int) -> bytes:
        self._unread -= size
        first = self._buffer[0] if self._buffer else END
        if len(first) == size:
            if size:
                self._buffer.popleft()
            data = bytes(first)  # no copy when the chunk is bytes already, as small messages are
        else:
            data = b"".join(self._cut(size))
        if self._writers:
            self.wake_writers()
        return data

    def _cut(self, size: int) -> list[Chunk]:
        parts: list[Chunk] = []
        while size:
            chunk = self._buffer.popleft()
            if len(chunk) > size:
                view = memoryview(chunk)
                self._buffer.appendleft(view[size:])
                chunk = view[:size]
            parts.append(chunk)
            size -= len(chunk)
        return parts

    # --- the end

    def break_off(self) -> None:
        """Break the pipe: everything under way is lost; both sides notice at once."""
        self.broken = True
        self._queue.clear()
        self._wire.clear()
        self._buffer.clear()
        self._under_way = self._unread = 0
        if self._timer is not None:
            self._timer.cancel()
        _wake(self._reader)
        self.wake_writers()

    def wake_writers(self) -> None:
        while self._writers:
            _wake(self._writers.popleft())


class MemoryStream(Stream):
    """One peer's end; `bootstrap.lab.in_memory.memory` makes them in pairs."""

    def __init__(
        self, remote: PeerId, outgoing: Pipe, incoming: Pipe, limits: StreamLimits, rng: Random
    ) -> None:
        self.remote = remote
        self.forget: Callable[[], None] = lambda: None  # called at the end of either stream's life
        self.twin: MemoryStream | None = None  # the other end
        self._outgoing, self._incoming = outgoing, incoming
        self._limits, self._rng = limits, rng
        self._wrote = 0.0
        self._closed = False
        self._lock = asyncio.Lock()  # writes of several tasks do not mix

    @window
    def __repr__(self) -> str:
        ended = self._closed or self._outgoing.broken
        return f"Peer: {short(self.remote)}, {'closed' if ended else 'open'} | Out: {self._outgoing!r}"

    @property
    def is_broken(self) -> bool:
        return self._outgoing.broken

    @property
    def heard(self) -> float:
        return self._incoming.heard

    @property
    def wrote(self) -> float:
        return self._wrote

    async def read(self, size: int) -> bytes:
        if self._closed:
            raise PeerUnreachable("the stream is closed")
        return await self._incoming.get(size)

    async def write(self, *buffers: Buffer) -> None:
        """See `Stream.write`; a write that is cancelled while it waits for room breaks the stream."""
        async with self._lock:
            self._check_writable()
            loss = self._outgoing.link.write_loss
            if loss and self._rng.random() < loss:
                self.break_off()
                self._check_writable()
            for buffer in buffers:
                await self._write_one(buffer)

    async def _write_one(self, buffer: Buffer) -> None:
        pipe, step = self._outgoing, self._limits.chunk
        for start in range(0, memoryview(buffer).nbytes, step):
            if pipe.full(self._limits.window):
                await self._wait_for_room()
            self._check_writable()
            pipe.put(_snapshot(buffer, start, start + step))
            self._wrote = asyncio.get_running_loop().time()

    async def _wait_for_room(self) -> None:
        pipe = self._outgoing
        try:
            while pipe.full(self._limits.window) and not pipe.broken and not self._closed:
                await pipe.room()
        except asyncio.CancelledError:
            self.break_off()  # half a message was sent; the rest would be taken for something else
            raise

    def _check_writable(self) -> None:
        if self._closed or self._outgoing.broken:
            raise PeerUnreachable("the stream is closed")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._outgoing.broken:
            self._outgoing.put(END)
            self._outgoing.wake_writers()
        self._incoming.break_off()
        self.forget()

    def break_off(self) -> None:
        """Lose the connection: both ends fail at once, and what was under way is gone."""
        self._outgoing.break_off()
        self._incoming.break_off()
        self.forget()
        if self.twin is not None:
            self.twin.forget()


def _snapshot(buffer: Buffer, start: int, end: int) -> Chunk:
    """Bytes `start` to `end` as they are now. What is `bytes` need not be copied: nobody can change it."""
    if isinstance(buffer, bytes) and start == 0 and len(buffer) <= end:
        return buffer
    view = memoryview(buffer).cast("B")[start:end]
    return view if isinstance(view.obj, bytes) else bytes(view)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
