"""The transport in memory: any number of peers in one process, with modelled links and injected faults.

Runs on every event loop; under `bootstrap.lab.in_memory.virtual_time` a swarm's hours pass in seconds, and the
same seed gives the same run. Limits of the model: peers need no connection before a stream, a receiver's
downlink is not shared (a link's bandwidth is taken from the sender's uplink), and the DHT loses no record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from bootstrap.lab.in_memory.memory_link import Link, LinkModel
from bootstrap.lab.in_memory.memory_network import EPOCH, InMemoryPeer, MemoryNetwork
from bootstrap.lab.in_memory.memory_stream import MemoryStream, StreamLimits
from protocol.access.admission import Admission
from protocol.errors import (
    DeadlineExceeded,
    NolocoError,
    PeerUnreachable,
    RecordError,
    TransportDown,
    UserError,
)
from protocol.ground import PeerId, Record
from protocol.records.identity import Identity, public_key_of
from protocol.records.records import expiry, key_digest, open_record, seal_record
from protocol.supervision import Supervisor, all_of
from protocol.transport.base import COPIES, Handler, Stream, Transport
from protocol.windows import counted, short, window

__all__ = ["EPOCH", "Link", "LinkModel", "MemoryNetwork", "MemoryTransport", "StreamLimits", "memory_address"]

logger = logging.getLogger(__name__)

_PREFIX = "/memory/"


def memory_address(peer: PeerId) -> str:
    return _PREFIX + peer


class MemoryTransport(Transport):
    """One peer. Its clock, links and faults are the network's."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self._identity = identity
        self.network = network
        self._running = False
        self._handlers: dict[str, Handler] = {}
        # dicts with no values instead of sets: objects in a set have an order that changes from run to run
        self._streams: dict[MemoryStream, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # of handlers
        self.supervise(Supervisor())
        self._connected: dict[PeerId, None] = {}  # peers met, of which some may be dead
        self._own_records: dict[str, tuple[bytes, float]] = {}  # key -> (sealed, expires)
        self.admission: Admission | None = None

    @window
    def __repr__(self) -> str:
        streams = f"{len(self._streams)} open, {len(self._tasks)} answered"
        state = "running" if self._running else "not running"
        met = counted(len(self._connected), "peer")
        return f"Peer: {short(self.peer_id)}, {state} | Streams: {streams} | Met: {met}"

    @property
    def streams(self) -> list[MemoryStream]:
        """The streams that are open, whoever opened them."""
        return list(self._streams)

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def now(self) -> float:
        return self.network.now(self.peer_id)

    def supervise(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def start(self) -> None:
        if not self._running:
            self.network.admit(self)
            self._running = True

    def addresses(self) -> list[str]:
        return [memory_address(self.peer_id)]

    async def connect(self, addresses: Sequence[str], deadline: float) -> list[PeerId]:
        self._check_running()
        wanted = dict.fromkeys(_peer_in(address) for address in addresses)
        wanted.pop(self.peer_id, None)
        answered = await all_of(*(self._meet(peer, deadline) for peer in wanted))
        return [peer for peer, answer in zip(wanted, answered, strict=True) if answer]

    async def _meet(self, peer: PeerId, deadline: float) -> bool:
        try:
            async with asyncio.timeout(deadline):
                other = await self.network.reach(self.peer_id, peer)
                await self.network.travel(peer, self.peer_id)
        except (TimeoutError, PeerUnreachable):
            return False
        self._check_running()
        self.network.join(self.peer_id, peer)
        self._connected[peer] = None
        other.met(self.peer_id)
        return True

    def met(self, peer: PeerId) -> None:
        self._connected[peer] = None

    async def restrict(self, admission: Admission, deadline: float) -> None:
        self.admission = admission

    async def shut_out(self, peer: PeerId) -> None:
        for stream in [stream for stream in self._streams if stream.remote == peer]:
            stream.break_off()
        self._connected.pop(peer, None)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Do nothing: in memory a peer id is enough to reach a peer."""

    async def dial_back(self, peer: PeerId, port: int, deadline: float) -> str:
        """Return "": nobody is behind a mapped port in memory."""
        return ""

    async def announce(self, addresses: Sequence[str]) -> None:
        """Do nothing, as for `learn`."""

    async def open(self, peer: PeerId, protocol: str, deadline: float, *, ahead: bool = False) -> Stream:
        self._check_running()
        if peer == self.peer_id:
            raise PeerUnreachable("a peer cannot open a stream to itself")
        if ahead and self.network.running(peer) is not None:
            return self._open_ahead(peer, protocol)
        try:
            async with asyncio.timeout(deadline):
                return await self._open(peer, protocol)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{peer} did not accept {protocol} within {deadline:g} s") from error

    async def _open(self, peer: PeerId, protocol: str) -> MemoryStream:
        network = self.network
        other = await self._reach(peer, protocol)
        self._check_running()
        mine, theirs = network.stream_pair(self.peer_id, peer)
        self._adopt(mine)
        other.accept(theirs, protocol)
        try:
            await network.travel(peer, self.peer_id)
        except asyncio.CancelledError:
            mine.break_off()  # the caller gave up waiting
            raise
        return mine

    def _open_ahead(self, peer: PeerId, protocol: str) -> MemoryStream:
        mine, theirs = self.network.stream_pair(self.peer_id, peer)
        self._adopt(mine)

        async def arrive() -> None:
            try:
                other = await self._reach(peer, protocol)
            except PeerUnreachable:
                mine.break_off()
                return
            if not mine.is_broken:
                other.accept(theirs, protocol)

        self._supervisor.spawn(arrive(), f"opening a stream of {protocol}")
        return mine

    async def _reach(self, peer: PeerId, protocol: str) -> InMemoryPeer:
        """The peer that takes a stream of `protocol`, or `PeerUnreachable` after a round trip."""
        network = self.network
        loss = network.link(self.peer_id, peer).open_loss
        other = await network.reach(self.peer_id, peer)
        if not other.accepts(self.peer_id, protocol) or (loss and network.rng.random() < loss):
            await network.travel(peer, self.peer_id)
            raise PeerUnreachable(f"{peer} does not accept {protocol}")
        return other

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler

    def accepts(self, peer: PeerId, protocol: str) -> bool:
        return not self.refuses(peer) and protocol in self._handlers

    def accept(self, stream: MemoryStream, protocol: str) -> None:
        self._adopt(stream)
        task = self._supervisor.spawn(self._handle(stream, protocol), f"answering a stream of {protocol}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _handle(self, stream: MemoryStream, protocol: str) -> None:
        try:
            await self._handlers[protocol](stream)
        except NolocoError as error:
            logger.debug("A stream of %s from %s ended: %s", protocol, stream.remote, error)
        finally:
            stream.close()

    def _adopt(self, stream: MemoryStream) -> None:
        self._streams[stream] = None
        self._connected[stream.remote] = None
        stream.forget = lambda: self._streams.pop(stream, None)

    async def put(self, key: str, value: bytes, lifetime: float, deadline: float) -> bool:
        self._check_running()
        _, last_expiry = self._own_records.get(key, (b"", 0.0))
        expires = expiry(self.now(), lifetime, last_expiry)
        sealed = seal_record(self._identity, key, value, expires, self._credential)
        digest = key_digest(key)
        open_record(digest, self.peer_id, sealed, expires, self.now())
        self._own_records[key] = (sealed, expires)
        try:
            async with asyncio.timeout(deadline):
                island = await self.network.search(self.peer_id)
        except (TimeoutError, PeerUnreachable):
            return False
        if not self.network.lets_in(self.peer_id, self._credential):
            return False
        return island.put(digest, self.peer_id, sealed, expires, self.network.now())

    def last_put(self, key: str) -> tuple[bytes, float] | None:
        return self._own_records.get(key)

    async def get(self, key: str, deadline: float, *, copies: int = COPIES) -> list[Record]:
        self._check_running()
        try:
            async with asyncio.timeout(deadline):
                island = await self.network.search(self.peer_id)
        except (TimeoutError, PeerUnreachable):
            return []
        if not self.network.lets_in(self.peer_id, self._credential, reads=True):
            return []
        records, mine = island.get(key_digest(key), self.now()), self.admission
        return [r for r in records if mine is None or mine.admits(r.subkey, r.credential, takes_part=True)]

    @property
    def _credential(self) -> bytes:
        return self.admission.own if self.admission is not None else b""

    async def peers(self) -> list[tuple[PeerId, list[str]]]:
        self._check_running()
        self._connected = {peer: None for peer in self._connected if self.network.running(peer) is not None}
        return [(peer, [memory_address(peer)]) for peer in sorted(self._connected)]

    async def remotes(self) -> dict[PeerId, list[str]]:
        return {}  # nobody is anywhere

    async def close(self) -> None:
        self._leave()
        for stream in list(self._streams):
            stream.close()
        await self._supervisor.close()

    def die(self) -> None:
        """End at once, without a word to anyone. See `MemoryNetwork.kill`."""
        self._leave()
        for stream in list(self._streams):
            stream.break_off()

    def _leave(self) -> None:
        if self._running:
            self._running = False
            self.network.expel(self.peer_id)
            current = asyncio.current_task()
            for task in list(self._tasks):
                if task is not current:
                    task.cancel()

    def _check_running(self) -> None:
        if not self._running:
            raise TransportDown("this peer has left the network, or has not joined it yet")


def _peer_in(address: str) -> PeerId:
    peer = address.removeprefix(_PREFIX)
    try:
        public_key_of(peer)
    except RecordError as error:
        raise UserError(f"{address!r} is no address in this network; try {_PREFIX}12D3Koo…") from error
    return PeerId(peer)
