"""One life of p2pd: the process, this peer's part of the DHT, and streams, for which p2pd hands over Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable, UserError, later
from protocol.ground import Buffer, PeerId
from protocol.records.addresses import Whereabouts, check_address, is_loopback, network_of, peer_id_in
from protocol.supervision import Supervisor, all_of, cancelled
from protocol.transport.base import Stream
from protocol.transport.dht import Dht
from protocol.transport.held_streams import HeldStreams
from protocol.transport.hivemind_api import PeerID, p2pd_pb2, read_pbmsg_safe
from protocol.transport.metering import UNMETERED, Meter
from protocol.transport.p2pd import Libp2pConfig, P2pd
from protocol.transport.p2pd_socket import P2pdSocket
from protocol.windows import short, window

logger = logging.getLogger(__name__)

# seconds for what p2pd answers without asking another peer: milliseconds, when it is well
_LOCAL_DEADLINE = 10.0
GREETING = b"\x13/multistream/1.0.0\n"  # the first words of whoever listens for libp2p over TCP
# Seconds between two looks at where connections come from: while a peer is not known, else.
LOCATED_AGAIN, LOCATED_EVERY = 1.0, 30.0
_ACCEPTED = b"\x01"  # a handler has taken the stream


class Libp2pStream(Stream):
    """Backpressure reaches from the remote reader through both p2pd to `write`; they buffer some MiB.

    Mutable state: whether the other end has still to take it.
    """

    def __init__(
        self, remote: PeerId, socket: P2pdSocket, when_taken: Callable[[], None] | None = None
    ) -> None:
        """With `when_taken` it is one that is being opened; that is called once a handler has taken it."""
        self.remote = remote
        self._socket = socket
        self._when_taken = when_taken
        self._lock = asyncio.Lock()  # writes of several tasks do not mix

    @window
    def __repr__(self) -> str:
        return f"Peer: {short(self.remote)} | {'closed' if self._socket.is_closing() else 'open'}"

    @property
    def heard(self) -> float:
        return self._socket.heard

    @property
    def wrote(self) -> float:
        return self._socket.wrote

    async def accepted(self, deadline: float) -> None:
        """Wait for the other end to say that a handler has taken the stream.

        p2pd opens streams of a protocol that it knows the peer to serve without asking the peer, even one
        that is frozen. Raises like `Transport.open`.
        """
        try:
            async with asyncio.timeout(deadline):
                await self.read(0)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.remote} did not accept it within {deadline:g} s") from error

    async def read(self, size: int) -> Buffer:
        if self._when_taken is not None:
            if await self._read(1) != _ACCEPTED:
                raise PeerUnreachable(f"{self.remote} speaks another protocol")
            self._when_taken()
            self._when_taken = None
        return await self._read(size)

    async def _read(self, size: int) -> Buffer:
        if self._socket.is_closing():
            raise PeerUnreachable("the stream is closed")
        try:
            return await self._socket.readexactly(size)
        except (OSError, EOFError) as error:
            raise PeerUnreachable(f"the stream from {self.remote} ended") from error

    async def write(self, *buffers: Buffer) -> None:
        """See `Stream.write`; a write that is cancelled while it waits for room breaks the stream."""
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
        view, meter = view.cast("B"), self._socket.meter
        start = 0
        while start < len(view):
            part = view[start : start + meter.slice_bytes]  # which may change meanwhile
            start += len(part)
            if wait := meter.sending(len(part)):
                await asyncio.sleep(wait)
            if self._socket.is_closing():
                raise ConnectionResetError
            self._socket.write(part)
            await self._socket.drain()

    def close(self) -> None:
        self._socket.close()

    def break_off(self) -> None:
        """Drop the connection with whatever was not sent yet."""
        self._socket.abort()


OnStream = Callable[[Libp2pStream, str], Awaitable[None]]  # (stream, protocol)


class Session:
    """Works until p2pd dies. Made by `Session.start`; `stop` must be called in any case."""

    def __init__(self, p2pd: P2pd, dht: Dht, on_stream: OnStream, supervisor: Supervisor) -> None:
        self.p2pd = p2pd
        self.dht = dht
        self.exited = supervisor.start(p2pd.exited(), "waiting for p2pd")  # says how it ended
        self._supervisor = supervisor  # of this life
        self._announced: tuple[str, ...] = ()
        self.addresses: list[str] = []  # at which p2pd believes it can be reached, without the peer id
        self._on_stream = on_stream
        self._listener = p2pd.directory / "streams.sock"
        self._server: asyncio.Server
        self._served: set[str] = set()
        self._refuses: Callable[[PeerId], bool] = lambda _: False
        self._networks: dict[PeerId, str] = {}  # as of `_located`, by the loop's clock
        self._located = -math.inf
        self._shut_out: Callable[[PeerId], Awaitable[None]] = self.disconnect
        self._held = HeldStreams()
        self.outside: dict[str, str] = {}  # by what p2pd takes a peer's place for, where it really is

    @window
    def __repr__(self) -> str:
        served, state = len(self._served), "ended" if self.exited.done() else "running"
        tasks = self._supervisor.running()
        return f"p2pd: {self.p2pd.pid}, {state} | Addresses: {len(self.addresses)} | Protocols: {served}, {tasks}"

    @classmethod
    async def start(
        cls,
        identity: Path,
        peer: PeerId,
        config: Libp2pConfig,
        on_stream: OnStream,
        now: Callable[[], float],
        supervisor: Supervisor,
        meter: Meter = UNMETERED,
    ) -> Session:
        """`now` is the wall clock, and `meter` that of this peer's streams. Closes the `supervisor` when it stops.

        Raises `ResourceError` or `UserError` as `P2pd.start`; nothing is left behind then.
        """
        p2pd = await P2pd.start(identity, config, supervisor, meter)
        try:
            async with asyncio.timeout(_LOCAL_DEADLINE):
                dht = await Dht.create(p2pd.p2p, peer, config.client_only, now, supervisor)
                session = cls(p2pd, dht, on_stream, supervisor)
                session._announced = config.announce
                await session.refresh_addresses()
                loop, accept = asyncio.get_running_loop(), partial(P2pdSocket, session._on_connection, meter)
                session._server = await loop.create_unix_server(accept, str(session._listener))
                return session
        except BaseException as error:
            await supervisor.close()
            await p2pd.stop()
            if isinstance(error, OSError | NolocoError):  # a timeout is an OSError
                why = str(error) or f"no answer within {_LOCAL_DEADLINE:g} s"
                raise later(UserError(f"p2pd started but does not respond ({why}). Try again.")) from error
            raise

    def refuse_by(
        self, refuses: Callable[[PeerId], bool], shut_out: Callable[[PeerId], Awaitable[None]]
    ) -> None:
        """Read neither streams nor the DHT's requests of peers that it `refuses`; who comes often is shut out."""
        self._refuses, self._shut_out = refuses, shut_out
        self.dht.refuse_by(self._refuse)
        self.dht.locate_by(self.network_of)

    async def network_of(self, peer: PeerId) -> str:
        """The network that a peer's connection comes from or leads to, as of a moment ago; empty if not known."""
        now = asyncio.get_running_loop().time()
        if now - self._located >= (LOCATED_EVERY if peer in self._networks else LOCATED_AGAIN):
            self._located = now
            with contextlib.suppress(NolocoError):
                self._networks = {each: network_of(places) for each, places in (await self.remotes()).items()}
        return self._networks.get(peer, "")

    async def _refuse(self, peer: PeerId) -> bool:
        """Return whether the peer is refused; of one that comes often, its connection is ended."""
        is_refused = self._refuses(peer)
        if is_refused and not self._held.comes_slowly(peer):
            await self._shut_out(peer)
        return is_refused

    async def refresh_addresses(self) -> None:
        """Ask p2pd again: with a router's help or another network, they change."""
        found = await self.p2pd.control.identify(_LOCAL_DEADLINE)
        order = {
            address: place for place, address in enumerate(self._announced)
        }  # the first is shown to people
        self.addresses = sorted(found, key=lambda one: (is_loopback(one), order.get(one, len(order))))

    async def serve(self, protocol: str) -> None:
        """Have incoming streams of `protocol` passed to `on_stream`. Raises like `P2pdControl`."""
        if protocol not in self._served:
            self._served.add(protocol)
            await self.p2pd.control.serve_streams(protocol, self._listener, _LOCAL_DEADLINE)

    async def open(
        self, peer: PeerId, protocol: str, deadline: float, *, ahead: bool, when_taken: Callable[[], None]
    ) -> Libp2pStream:
        """See `Transport.open`; calls `when_taken` once a handler has taken the stream."""
        ends = asyncio.get_running_loop().time() + deadline
        socket = await self.p2pd.control.open_stream(peer, protocol, deadline)
        stream = Libp2pStream(peer, socket, when_taken)
        try:
            if not ahead:
                await stream.accepted(ends - asyncio.get_running_loop().time())
        except BaseException:
            stream.break_off()
            raise
        return stream

    async def dial_any(self, peer: PeerId, addresses: list[str], deadline: float) -> bool:
        """Connect to the peer at whichever of its addresses answers first; False when none does in time."""
        connect, start = self.p2pd.control.connect, self._supervisor.start
        dials = [start(connect(address, peer, deadline)) for address in addresses]
        try:
            for dial in asyncio.as_completed(dials, timeout=deadline):
                try:
                    await dial
                except (NolocoError, TimeoutError) as error:
                    logger.debug("%s cannot be dialled at one of its addresses: %s", peer, error)
                else:
                    return True
            return False
        finally:
            await cancelled(dials)

    async def join(self, addresses: list[str], deadline: float) -> list[PeerId]:
        """Dial all addresses at once, then meet the neighbours in the DHT through those that answered."""
        ends = asyncio.get_running_loop().time() + deadline
        met = await all_of(*(self._meet(address, deadline) for address in addresses))
        answered = list(dict.fromkeys(peer for peer in met if peer is not None))
        if answered and not await self.dht.explore(ends - asyncio.get_running_loop().time()):
            logger.debug("Joining the DHT took longer than %g s; it goes on in the background", deadline)
        return answered

    async def _meet(self, address: str, deadline: float) -> PeerId | None:
        peer = peer_id_in(address)
        try:
            async with asyncio.timeout(deadline):
                await self.p2pd.control.connect(address, peer, deadline)
                if await self.dht.greet(peer):
                    return peer
                logger.info("The peer at %s can be reached but does not respond", address)
        except (NolocoError, TimeoutError) as error:
            logger.info("No answer from %s (%s)", address, error)
        return None

    async def connected(self, deadline: float = _LOCAL_DEADLINE) -> list[PeerId]:
        """The peers connected at present. Raises like `P2pdControl`, and so does `addresses_of`."""
        return await self.p2pd.control.list_peers(min(deadline, _LOCAL_DEADLINE))

    async def disconnect(self, peer: PeerId) -> None:
        await self.p2pd.control.disconnect(peer, _LOCAL_DEADLINE)

    async def addresses_of(self, peer: PeerId) -> list[str]:
        """The addresses at which a connected peer listens; none when it has left meanwhile."""
        try:
            places = await self.p2pd.control.find_peer(peer, _LOCAL_DEADLINE)
        except PeerUnreachable:
            return []
        return [address for place in places if _plain(address := f"{place}/p2p/{peer}")]

    async def remotes(self) -> dict[PeerId, list[str]]:
        """See `Transport.remotes`. Raises like `P2pdControl`."""
        found = await self.p2pd.control.remote_addresses(_LOCAL_DEADLINE)
        return {
            peer: [self.outside.get(a, a) for a in places if "p2p-circuit" not in a]
            for peer, places in found.items()
        }

    async def dial_back(self, peer: PeerId, port: int, here: Whereabouts, deadline: float) -> str:
        """See `Transport.dial_back`; `here` is where this peer is."""
        try:
            for remote in (await self.remotes()).get(peer, []):
                _, kind, host, *_ = remote.split("/")
                address = f"/{kind}/{host}/tcp/{port}"
                if here.may_dial(address) and await speaks_libp2p(host, port, deadline):
                    return address
        except (NolocoError, TimeoutError, OSError) as error:
            logger.debug("%s cannot be dialled back at port %d: %s", peer, port, error)
        return ""

    async def stop(self) -> None:
        """Break all streams, end p2pd. Takes 3 s at most."""
        self._server.close()
        await self._supervisor.close()
        await self.p2pd.stop()

    async def _turn_away(self, peer: PeerId, connection: P2pdSocket) -> None:
        if self._held.comes_slowly(peer):
            await self._held.hold(peer, connection)
        else:
            await self._shut_out(peer)

    def _on_connection(self, connection: P2pdSocket) -> None:
        task = self._supervisor.spawn(self._incoming(connection), "answering a stream")
        task.add_done_callback(lambda _: connection.close())  # also if the task is cancelled before it began

    async def _incoming(self, connection: P2pdSocket) -> None:
        info = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(_LOCAL_DEADLINE):
                await read_pbmsg_safe(connection, info)
            peer = PeerId(PeerID(info.peer).to_base58())
            if self._refuses(peer):
                await self._turn_away(peer, connection)
                return
            stream = Libp2pStream(peer, connection)
            await stream.write(_ACCEPTED)
            await self._on_stream(stream, info.proto)
        except (OSError, EOFError, TimeoutError, NolocoError) as error:
            logger.debug("An incoming stream ended: %s", error)


async def speaks_libp2p(host: str, port: int, deadline: float) -> bool:
    """Return whether whoever listens there greets as libp2p. Raises `OSError`, `TimeoutError` after the deadline."""
    async with asyncio.timeout(deadline):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            return await reader.read(len(GREETING)) == GREETING
        finally:
            writer.close()


def _plain(address: str) -> bool:
    """Return whether an address leads neither through a relay nor over another transport than TCP."""
    try:
        check_address(address)
    except UserError:
        return False
    return True
