"""A libp2p stream as p2pd hands it over: a Unix socket."""

from __future__ import annotations

import asyncio

from protocol.errors import DeadlineExceeded, PeerUnreachable
from protocol.transport.base import Buffer, PeerId, Stream
from protocol.transport.p2pd_socket import P2pdSocket

_SLICE = 4 << 20  # bytes handed to the socket at once; between two slices a closed stream is noticed
_ACCEPTED = b"\x01"


class Libp2pStream(Stream):
    """Backpressure reaches from the remote reader through both p2pd to `write`; they buffer some MiB."""

    def __init__(self, remote: PeerId, socket: P2pdSocket) -> None:
        self.remote = remote
        self._socket = socket
        self._lock = asyncio.Lock()  # writes of several tasks do not mix

    @property
    def heard(self) -> float:
        return self._socket.heard

    @property
    def wrote(self) -> float:
        return self._socket.wrote

    async def accept(self) -> None:
        """Tell the opener that a handler has taken the stream."""
        await self.write(_ACCEPTED)

    async def accepted(self, deadline: float) -> None:
        """Wait for `accept` at the other end.

        p2pd opens streams of a protocol that it knows the peer to serve without asking the peer, even one
        that is frozen. Raises as `Transport.open`.
        """
        try:
            async with asyncio.timeout(deadline):
                if await self.read(1) != _ACCEPTED:
                    raise PeerUnreachable(f"{self.remote} speaks another protocol")
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.remote} did not accept the stream within {deadline:g} s"
            ) from error

    async def read(self, size: int) -> Buffer:
        if self._socket.is_closing():
            raise PeerUnreachable("the stream is closed")
        try:
            return await self._socket.readexactly(size)
        except (OSError, EOFError) as error:
            raise PeerUnreachable(f"the stream from {self.remote} ended") from error

    async def write(self, *buffers: Buffer) -> None:
        """As in `Stream.write`; a write that is cancelled while it waits for room breaks the stream."""
        async with self._lock:
            try:
                for buffer in buffers:
                    await self._write_one(buffer)
            except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError on a closed handle
                raise PeerUnreachable(f"the stream to {self.remote} is closed") from error
            except asyncio.CancelledError:
                self._socket.abort()  # half a message was sent; the rest would be misread
                raise

    async def _write_one(self, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if not view.nbytes:
            return  # and could not be cast
        view = view.cast("B")
        for start in range(0, len(view), _SLICE):
            if self._socket.is_closing():
                raise ConnectionResetError
            self._socket.write(view[start : start + _SLICE])
            await self._socket.drain()

    def close(self) -> None:
        self._socket.close()

    def break_off(self) -> None:
        """Drop the connection with whatever was not sent yet."""
        self._socket.abort()
