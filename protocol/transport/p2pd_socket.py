"""Talking to a running p2pd over Unix sockets: requests, one short-lived connection for each, and streams.

hivemind's own client leaves its connections open when a request fails or is cancelled, and waits for ever when p2pd
does not answer. Here each request closes what it opened and ends by its deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import numpy as np

from protocol.errors import DeadlineExceeded, PeerUnreachable, TransportDown
from protocol.ground import Buffer, PeerId
from protocol.records.addresses import without_peer
from protocol.transport.hivemind_api import Multiaddr, PeerID, read_pbmsg_safe, write_pbmsg
from protocol.transport.hivemind_api import p2pd_pb2 as pb
from protocol.transport.metering import UNMETERED, Meter

READ_AHEAD = 1 << 20  # bytes that Python holds unasked before p2pd, and so the sender, has to wait
_SCRATCH = 64 << 10  # bytes taken from the kernel at once when nobody waits for them
# bytes from which memory is taken as it is; what is smaller costs nothing to fill with zeros
_BULK = 64 << 10
_LOOK = 0.2  # seconds between two looks at how much the kernel has taken of what a writer waits for


class P2pdControl:
    """Requests to a running p2pd.

    Every method raises `PeerUnreachable` when p2pd could not do it, `DeadlineExceeded` when it is slow, and
    `TransportDown` when it is gone.
    """

    def __init__(self, socket: Path, meter: Meter = UNMETERED) -> None:
        """`meter` has the say over what the streams carry."""
        self._socket = socket
        self._meter = meter

    async def identify(self, deadline: float) -> list[str]:
        """The addresses under which p2pd believes that others reach it, without /p2p/<peer id>."""
        answer = await self._ask(deadline, pb.Request.IDENTIFY)
        return _texts(answer.identify.addrs)

    async def connect(self, address: str, peer: PeerId, deadline: float) -> None:
        """Dial one address (already checked) and make sure that `peer` answers there."""
        place = Multiaddr(without_peer(address)).to_bytes()
        request = pb.ConnectRequest(peer=_raw(peer), addrs=[place], timeout=math.ceil(deadline))
        await self._ask(deadline, pb.Request.CONNECT, connect=request)

    async def disconnect(self, peer: PeerId, deadline: float) -> None:
        """End all connections with a peer."""
        await self._ask(deadline, pb.Request.DISCONNECT, disconnect=pb.DisconnectRequest(peer=_raw(peer)))

    async def list_peers(self, deadline: float) -> list[PeerId]:
        """The peers connected at present, sorted."""
        answer = await self._ask(deadline, pb.Request.LIST_PEERS)
        return sorted(PeerId(PeerID(info.id).to_base58()) for info in answer.peers)

    async def remote_addresses(self, deadline: float) -> dict[PeerId, list[str]]:
        """The addresses that the connections lead to or come from, by peer."""
        answer = await self._ask(deadline, pb.Request.LIST_PEERS)
        return {PeerId(PeerID(info.id).to_base58()): _texts(info.addrs) for info in answer.peers}

    async def find_peer(self, peer: PeerId, deadline: float) -> list[str]:
        """The addresses at which `peer` says that it listens."""
        request = pb.DHTRequest(type=pb.DHTRequest.FIND_PEER, peer=_raw(peer), timeout=math.ceil(deadline))
        answer = await self._ask(deadline, pb.Request.DHT, dht=request)
        return _texts(answer.dht.peer.addrs)

    async def serve_streams(self, protocol: str, listener: Path, deadline: float) -> None:
        """Have p2pd connect to the socket `listener` for every incoming stream of `protocol`."""
        place = Multiaddr(f"/unix{listener}").to_bytes()
        request = pb.StreamHandlerRequest(addr=place, proto=[protocol], balanced=False)
        await self._ask(deadline, pb.Request.STREAM_HANDLER, streamHandler=request)

    async def open_stream(self, peer: PeerId, protocol: str, deadline: float) -> P2pdSocket:
        """A connection that carries the new stream; the caller closes it."""
        request = pb.StreamOpenRequest(peer=_raw(peer), proto=[protocol], timeout=math.ceil(deadline))
        connection, _ = await self._exchange(deadline, pb.Request.STREAM_OPEN, streamOpen=request)
        return connection

    async def _ask(self, deadline: float, kind: int, **body: object) -> pb.Response:
        connection, answer = await self._exchange(deadline, kind, **body)
        connection.close()
        return answer

    async def _exchange(self, deadline: float, kind: int, **body: object) -> tuple[P2pdSocket, pb.Response]:
        """The answer, and the connection that it came on, still open."""
        try:
            async with asyncio.timeout(deadline):
                return await self._exchanged(pb.Request(type=kind, **body))
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {deadline:g} s") from error
        except (OSError, EOFError) as error:
            raise TransportDown(f"p2pd is gone ({error})") from error

    async def _exchanged(self, request: pb.Request) -> tuple[P2pdSocket, pb.Response]:
        loop, answer = asyncio.get_running_loop(), pb.Response()
        _, connection = await loop.create_unix_connection(
            lambda: P2pdSocket(meter=self._meter), str(self._socket)
        )
        try:
            await write_pbmsg(connection, request)
            await read_pbmsg_safe(connection, answer)
            if answer.type == pb.Response.ERROR:
                raise PeerUnreachable(_reason(answer.error.msg))
        except BaseException:
            connection.close()
            raise
        return connection, answer


def _reason(message: str) -> str:
    """The last cause that libp2p names; before it stand the causes' causes, and a line for each address."""
    return message.strip().splitlines()[-1].rsplit(": ", 1)[-1].rstrip(")")


def _raw(peer: PeerId) -> bytes:
    raw: bytes = PeerID.from_base58(peer).to_bytes()
    return raw


def _texts(addresses: Iterable[bytes]) -> list[str]:
    return [str(Multiaddr(address)) for address in addresses]


class P2pdSocket(asyncio.BufferedProtocol):
    """A connection for bulk data: asyncio's protocol, with the methods of its readers and writers.

    What a reader waits for goes from the kernel straight into the memory that the reader gets, and what a writer
    gives goes to the kernel from where it lies. asyncio's own reader and writer copy every byte several times.

    Mutable state: bytes read ahead, what is missing of the memory that a reader waits for, a writer that waits,
    whether reading rests for the sake of memory or of the meter, whether and how the connection ended.
    """

    def __init__(self, made: Callable[[P2pdSocket], None] = lambda _: None, meter: Meter = UNMETERED) -> None:
        self.heard = 0.0  # the loop's time at which bytes last came
        self.wrote = 0.0  # the same of bytes that the kernel took, known to `_LOOK` seconds
        self._made = made  # called once, when the connection is there
        self.meter = meter
        self._loop = asyncio.get_running_loop()
        self._ahead = bytearray()
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._missing: memoryview | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._has_room = True
        self._is_full = False
        self._is_throttled = False
        self._ended: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=0)  # so `drain` waits until the kernel has everything
        self._made(self)

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
        if self._is_full and len(self._ahead) < READ_AHEAD:
            self._is_full = False
            self._read_on()
        return data

    def _read_on(self) -> None:
        if not (self._is_full or self._is_throttled or self._transport.is_closing()):
            self._transport.resume_reading()

    def _throttled(self, seconds: float) -> None:
        """Take nothing more from p2pd for so long; it makes the sender wait."""
        self._is_throttled = True
        self._transport.pause_reading()
        self._loop.call_later(seconds, self._unthrottled)

    def stop_reading(self) -> None:
        """Take nothing more from p2pd for good."""
        if not (self._is_full or self._is_throttled or self._transport.is_closing()):
            self._transport.pause_reading()
        self._is_full = True

    def _unthrottled(self) -> None:
        self._is_throttled = False
        self._read_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._missing or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = self._loop.time()
        if (wait := self.meter.received(nbytes)) and not self._is_throttled:
            self._throttled(wait)
        if self._missing:
            self._missing = self._missing[nbytes:]
            if not self._missing:
                _wake(self._reader)
            return
        self._ahead += self._scratch[:nbytes]
        if len(self._ahead) >= READ_AHEAD:
            self._is_full = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._end(EOFError("the connection ended"))
        return True  # what is still to be written may be wanted

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
