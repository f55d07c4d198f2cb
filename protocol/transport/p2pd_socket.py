"""A connection to p2pd over a Unix socket, for bulk data.

What a reader waits for goes from the kernel straight into the memory that the reader gets, and what a writer gives
goes to the kernel from where it lies. asyncio's own reader and writer copy every byte several times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import numpy as np

from protocol.transport.base import Buffer

READ_AHEAD = 1 << 20  # bytes that Python holds unasked before p2pd, and so the sender, has to wait
_SCRATCH = 64 << 10  # bytes taken from the kernel at once when nobody waits for them
# bytes from which memory is taken as it is; what is smaller costs nothing to fill with zeros
_BULK = 64 << 10
_LOOK = 0.2  # seconds between two looks at how much the kernel has taken of what a writer waits for


class P2pdSocket(asyncio.BufferedProtocol):
    """asyncio's protocol of one connection, with the methods of its readers and writers.

    Mutable state: bytes read ahead, what is missing of the memory that a reader waits for, a writer that waits,
    whether and how the connection ended.
    """

    def __init__(self, made: Callable[[P2pdSocket], None] = lambda _: None) -> None:
        self.heard = 0.0  # the loop's time at which bytes last came
        self.wrote = 0.0  # the same of bytes that the kernel took, known to `_LOOK` seconds
        self._made = made  # called once, when the connection is there
        self._loop = asyncio.get_running_loop()
        self._ahead = bytearray()
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._missing: memoryview | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._has_room = True
        self._is_paused = False
        self._ended: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=0)  # so `drain` waits until the kernel has everything
        self._made(self)

    # --- reading

    async def readexactly(self, size: int) -> Buffer:
        """A cancelled call takes nothing. Raises `EOFError` or `OSError` when the connection ended before."""
        if self._reader is not None:
            raise RuntimeError("another task reads from this connection already")
        have = len(self._ahead)
        if have >= size:
            return self._take(size)
        if self._ended is not None:
            raise self._ended
        memory = _memory(size)
        memory[:have] = self._take(have)
        self._missing = memoryview(memory)[have:]
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            if self._missing:
                self._ahead += memory[: size - len(self._missing)]
            self._missing = self._reader = None
        return memory

    def _take(self, size: int) -> bytes:
        data = bytes(memoryview(self._ahead)[:size])
        del self._ahead[:size]
        if self._is_paused and len(self._ahead) < READ_AHEAD:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._missing or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = self._loop.time()
        if self._missing:
            self._missing = self._missing[nbytes:]
            if not self._missing:
                _wake(self._reader)
            return
        self._ahead += self._scratch[:nbytes]
        if len(self._ahead) >= READ_AHEAD:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._end(EOFError("the connection ended"))
        return True  # what is still to be written may be wanted

    # --- writing

    def write(self, data: Buffer) -> None:
        """The data must stay unchanged until `drain` returns."""
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the kernel has everything. Raises `OSError` when the connection broke."""
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        if not self._has_room:
            self._writer = self._loop.create_future()
            self._look(self._transport.get_write_buffer_size())
            try:
                await self._writer
            finally:
                self._writer = None
                self._next_look.cancel()
        self.wrote = self._loop.time()

    def _look(self, before: int) -> None:
        """Note whether the kernel took something of the `before` bytes, now and again until it has them all."""
        left = self._transport.get_write_buffer_size()
        if left < before:
            self.wrote = self._loop.time()
        self._next_look = self._loop.call_later(_LOOK, self._look, left)

    def pause_writing(self) -> None:
        self._has_room = False

    def resume_writing(self) -> None:
        self._has_room = True
        _wake(self._writer)

    # --- the end

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or EOFError("the connection ended"))
        if self._writer is not None and not self._writer.done():
            self._writer.set_exception(error or ConnectionResetError("the connection is lost"))

    def _end(self, how: Exception) -> None:
        self._ended = self._ended or how
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(self._ended)


def _memory(size: int) -> bytearray | memoryview:
    """Writable, with whatever was in it: bytearray fills it with zeros, which takes 0.1 ms or more for 8 MB."""
    return bytearray(size) if size < _BULK else np.empty(size, np.uint8).data


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
