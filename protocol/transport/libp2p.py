"""The transport between real peers: libp2p through hivemind's p2pd, restarted when it dies.

Everything runs in the loop of the caller. While p2pd is down, calls raise `TransportDown`; streams that were
open then are broken. A new p2pd gets the same identity and port, the same handlers, the peers that were
connected and this peer's last records.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from protocol.access.admission import Admission
from protocol.access.peer_limits import PeerTable, doubled
from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable, TransportDown
from protocol.ground import PeerId, Record
from protocol.records.addresses import Whereabouts, check_address, dialable, host_of, is_loopback, peer_id_in
from protocol.records.identity import Identity
from protocol.records.records import expiry, is_in_reach, key_digest, open_record, seal_record
from protocol.supervision import Supervisor, Work
from protocol.transport.base import COPIES, Handler, Stream, Transport
from protocol.transport.dialling import Dials
from protocol.transport.held_open import answered, begun, handed_over, multiaddress, p2pd_at
from protocol.transport.libp2p_session import Libp2pStream, Session
from protocol.transport.metering import Meter
from protocol.transport.p2pd import Libp2pConfig
from protocol.transport.passing_on import PASS_ON, PASSED_ON
from protocol.transport.punching import MOST_SEEN, PUNCH, SEEN_AT, Around, Punching
from protocol.transport.third_peers import ThirdPeers
from protocol.windows import counted, short, window

__all__ = ["Libp2pConfig", "Libp2pTransport"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULTS = Libp2pConfig()
# Seconds between two looks at who is connected. After p2pd died, the others' p2pd refuse to dial this peer for
# 5 s once an attempt has failed; whom this peer knows, it dials itself at once.
_LOOK_AROUND = 3.0
_BOOK_SIZE = 64  # peers redialled at most; the DHT knows the others
_BOOK_ADDRESSES = 4  # of each
_REJOIN_DEADLINE = 15.0  # seconds
_RESTART_DEADLINE = 30.0  # seconds for p2pd to be up again and to have dialled whom it knew
_LONGEST_PAUSE = 30.0  # seconds between attempts to restart p2pd
# seconds of advance that dialling a peer directly has, before a stream goes through others, and that it takes at most
HEAD_START, DIRECT_DEADLINE = 0.5, 5.0
MOST_HELD = 64  # connections begun for p2pd, `MOST_SEEN` with each peer: each is two sockets and half a MiB
WATCHDOG = "watching the network process"


class Libp2pTransport(Transport):
    """One peer, with the key in the file `identity_path`. Raises `StateError` when that cannot be read."""

    def __init__(self, identity_path: Path, config: Libp2pConfig = _DEFAULTS) -> None:
        self._identity = Identity.load(identity_path)
        self.peer_id = self._identity.peer_id
        self._identity_path = identity_path
        self._config = config  # with the real port, once it is known
        self._meter = Meter(config.upload, config.download)  # whichever p2pd runs
        self._session: Session | None = None  # None while p2pd is down
        self._latest: Session | None = None  # the last one started, to be stopped in any case
        self._handlers: dict[str, Handler] = {}
        self._thirds = ThirdPeers(
            self._identity,
            self._open_to_third,
            self._open_connected,
            self._handlers,
            lambda peer: self.refuses(peer),
        )
        self._handlers[PASS_ON] = self._on_pass_on
        self._handlers[PASSED_ON] = self._thirds.on_passed_on
        around = Around(
            observers=lambda: self.ways_in,
            port=lambda: self._config.port,
            open_connected=self._open_connected,
            open_through=self._thirds.open,
            remotes=self.remotes,
            take=self._take_named,
            dial=lambda peer, addresses, deadline: self._up().dial_any(peer, addresses, deadline),
            begin=self._begin,
        )
        self._punching = Punching(around)
        self._handlers[SEEN_AT] = self._on_seen_at
        self._handlers[PUNCH] = self._on_punch
        self._book = PeerTable[list[str]](_BOOK_SIZE)  # addresses of peers met, the latest last
        self._dials = Dials()  # by the peers' own records
        self._held = Counter[PeerId]()  # connections that are being begun or held open
        self._joined_at = set[bool]()  # whether an address that answered `connect` was of this machine
        self._own_records: dict[str, tuple[bytes, float]] = {}  # key -> (sealed, expires)
        self._admission: Admission | None = None  # None: to an open run, or to none yet
        self._shutting_out = set[PeerId]()
        self._restarting = False  # p2pd has been stopped on purpose
        self._revived = asyncio.Event()  # and runs again
        self._rejoining: asyncio.Task[None] | None = None
        self.supervise(Supervisor())

    @window
    def __repr__(self) -> str:
        process = "not started" if self._latest is None else f"{self.pid or 'down'}, port {self._config.port}"
        known = f"{len(self._handlers)} | Book: {counted(len(self._book), 'peer')}"
        tasks = self._supervisor.running()
        return f"Peer: {short(self.peer_id)} | p2pd: {process} | Protocols: {known} | Tasks: {tasks}"

    @property
    def pid(self) -> int | None:
        """The number of the process p2pd; None while none runs."""
        return None if self._session is None else self._session.p2pd.pid

    def supervise(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._life = supervisor.group()  # of one p2pd after another

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def now(self) -> float:
        return time.time()

    def moved(self) -> tuple[int, int]:
        return self._meter.moved

    def limit(self, upload: float, download: float) -> None:
        self._meter.limit(upload, download)

    async def start(self) -> None:
        if self._latest is None:
            self._session = await self._new_session()
            self._supervisor.keep(WATCHDOG, self._watch, "Should p2pd die meanwhile, no peer can be reached.")

    def addresses(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in self._up().addresses]

    async def connect(self, addresses: Sequence[str], deadline: float) -> list[PeerId]:
        session = self._up()
        checked = dict.fromkeys(map(check_address, addresses))
        wanted = [address for address in checked if peer_id_in(address) != self.peer_id]
        answered = await self._while_up(session, session.join(wanted, deadline))
        for address in wanted:
            if (peer := peer_id_in(address)) in answered:
                known = dict.fromkeys([address, *self._book.get(peer, [])])
                self._book[peer] = list(known)[:_BOOK_ADDRESSES]
                self._joined_at.add(is_loopback(address))
        return answered

    async def open(self, peer: PeerId, protocol: str, deadline: float, *, ahead: bool = False) -> Stream:
        """See `Transport.open`. A peer that could not be reached rests for a while, unless it comes by itself."""
        session, clock = self._up(), asyncio.get_running_loop().time
        if self._thirds.calls_itself_hidden(peer):
            is_direct = await self._is_direct(session, peer, min(HEAD_START, deadline))
            self._thirds.note_direct(peer, is_direct=is_direct)
            if not is_direct:
                return await self._thirds.open(peer, protocol, deadline)
        if self._dials.rests(peer, clock()) and peer not in await session.connected(deadline):
            raise PeerUnreachable(f"{peer} could not be reached a moment ago")
        try:
            return await self._open(session, peer, protocol, deadline, ahead)
        except (PeerUnreachable, DeadlineExceeded) as error:
            self._check_still_up(session)
            self._dials.failed(peer, clock())
            if isinstance(error, PeerUnreachable):
                raise PeerUnreachable(f"{peer} cannot be reached for {protocol}: {error}") from error
            raise DeadlineExceeded(f"{peer} did not accept {protocol} within {deadline:g} s") from error

    async def _is_direct(self, session: Session, peer: PeerId, patience: float) -> bool:
        """Return whether a connection to a peer that others pass streams on to is there; it is dialled before."""
        if (await session.remotes()).get(peer):
            return True
        if self._may_meet(peer):  # where it dials at the same time TLS has two callers; the ports then rest
            return False
        dial = self._dial_directly(session, peer)
        if dial is None:
            return False
        await asyncio.wait([dial], timeout=patience)
        return dial.done() and not dial.cancelled() and dial.result()

    def _dial_directly(self, session: Session, peer: PeerId) -> asyncio.Task[bool] | None:
        """Dial a peer that others pass streams on to; None where its record has no usable address, or it rests."""
        addresses = self._dials.take_direct(
            peer, self._whereabouts(session), asyncio.get_running_loop().time()
        )
        if not addresses:
            return None
        return self._supervisor.start(session.dial_any(peer, addresses, DIRECT_DEADLINE))

    async def _leave_ways(self, session: Session) -> None:
        """Have streams that go through others replaced by direct ones; dial their peers for that now and then."""
        relayed = self._thirds.relayed()
        if not relayed and not self.is_hidden:
            self.relayed = self.met_directly = frozenset()
            return
        places, now = await session.remotes(), asyncio.get_running_loop().time()
        self.met_directly = frozenset(filter(self._may_meet, (peer for peer in places if places[peer])))
        self.relayed = frozenset(peer for peer in relayed if not places.get(peer))
        for peer in relayed:
            if peer not in self.relayed:
                self._thirds.supersede(peer)
                continue
            if not self._may_meet(peer):
                self._dial_directly(session, peer)
            elif self.peer_id < peer and self._dials.take_meeting(peer, now):
                self._supervisor.start(self._punching.meet(peer))

    async def seen_by(self, observers: Sequence[PeerId]) -> list[str]:
        return await self._punching.seen_by(observers)

    def _may_meet(self, peer: PeerId) -> bool:
        """Return whether a direct connection has to be arranged: nobody can dial either end."""
        return self.is_hidden and self._thirds.calls_itself_hidden(peer)

    async def _on_seen_at(self, stream: Stream) -> None:
        if self._admission is None or self._admission.knows(stream.remote):
            await self._punching.on_seen_at(stream)

    async def _on_punch(self, stream: Stream) -> None:
        if self._may_meet(stream.remote):
            await self._punching.on_punch(stream)

    def _begin(self, address: str) -> int:
        """See `Around.begin`."""
        session, peer = self._up(), peer_id_in(address)
        if self._held.total() >= MOST_HELD or self._held[peer] >= MOST_SEEN:
            raise OSError(f"{self._held.total()} connections are held open already")
        held = begun(address, self._config.host, self._config.port)
        port: int = held.getsockname()[1]
        self._held[peer] += 1

        async def hold() -> None:
            try:
                if await answered(held):
                    await self._hand_over(session, held, address)
            except OSError as error:
                logger.debug("The connection with %s has ended: %s", address, error)

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            self._held -= Counter([peer])

        stops = "A peer is not reached directly."
        self._supervisor.spawn(hold(), "holding a connection open", stops).add_done_callback(ended)
        return port

    async def _hand_over(self, session: Session, held: socket.socket, address: str) -> None:
        host = p2pd_at(self._config.host)
        async with handed_over(held, host, self._config.port) as (port, copying):
            taken_for, outside = multiaddress(host, port), address.partition("/p2p/")[0]
            session.outside[taken_for] = outside
            try:
                await copying.run()
            finally:
                del session.outside[taken_for]

    def _take_named(self, peer: PeerId, addresses: Sequence[str]) -> list[str]:
        """See `Around.take`."""
        named, now = [f"{address}/p2p/{peer}" for address in addresses], asyncio.get_running_loop().time()
        return self._dials.take_named(peer, named, self._whereabouts(self._up()), now)

    async def _open(
        self, session: Session, peer: PeerId, protocol: str, deadline: float, ahead: bool
    ) -> Libp2pStream:
        """A stream; when libp2p's routing does not find the peer, through the addresses of its own record."""
        clock = asyncio.get_running_loop().time
        ends = clock() + deadline
        taken = partial(self._dials.succeeded, peer)
        try:
            return await session.open(peer, protocol, deadline, ahead=ahead, when_taken=taken)
        except PeerUnreachable:
            addresses = self._dials.take(peer, self._whereabouts(session), clock())
            if not await session.dial_any(peer, addresses, ends - clock()):
                raise
        return await session.open(peer, protocol, ends - clock(), ahead=ahead, when_taken=taken)

    async def _open_to_third(self, peer: PeerId, protocol: str, deadline: float) -> Stream:
        """A stream to a peer that passes streams on; it is dialled. Raises as `open`."""
        return await self._open(self._up(), peer, protocol, deadline, ahead=True)

    async def _open_connected(self, peer: PeerId, protocol: str, deadline: float) -> Stream:
        """A stream to a peer that is connected, at once. Raises as `open`."""
        session = self._up()
        if peer not in await session.connected(deadline):
            raise PeerUnreachable(f"{peer} is not connected")
        return await session.open(peer, protocol, deadline, ahead=True, when_taken=lambda: None)

    async def _on_pass_on(self, stream: Stream) -> None:
        if self._admission is None or self._admission.knows(stream.remote):
            await self._thirds.on_pass_on(stream)

    def learn_ways(self, peer: PeerId, through: Sequence[PeerId]) -> None:
        self._thirds.learn(peer, through)

    def goes_through_others(self, peer: PeerId) -> bool:
        return self.is_hidden and self._thirds.is_needed_for(peer)

    def pass_on(self, rate: float) -> None:
        self._thirds.passing.limit(rate)

    def keep_way_to(self, peer: PeerId) -> float:
        return self._thirds.passing.keep_for(peer)

    @property
    def passed_on(self) -> int:
        return self._thirds.passing.nbytes

    def _whereabouts(self, session: Session) -> Whereabouts:
        own = session.addresses
        on_machine = (near.address for nears in psutil.net_if_addrs().values() for near in nears)
        places = [*own, *(f"/ip{6 if ':' in near else 4}/{near.partition('%')[0]}" for near in on_machine)]
        is_local = (bool(own) and all(map(is_loopback, own))) or self._joined_at == {True}
        return Whereabouts(frozenset(host for place in places if (host := host_of(place))), is_local)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._dials.learn(peer, addresses)

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler
        if self._session is not None:
            await self._session.serve(protocol)

    async def put(self, key: str, value: bytes, lifetime: float, deadline: float) -> bool:
        session = self._up()
        _, last_expiry = self._own_records.get(key, (b"", 0.0))
        expires = expiry(self.now(), lifetime, last_expiry)
        credential = self._admission.own if self._admission is not None else b""
        sealed = seal_record(self._identity, key, value, expires, credential)
        open_record(key_digest(key), self.peer_id, sealed, expires, self.now())
        self._own_records[key] = (sealed, expires)
        return await self._while_up(session, session.dht.put(key, sealed, self.peer_id, expires, deadline))

    def last_put(self, key: str) -> tuple[bytes, float] | None:
        return self._own_records.get(key)

    async def get(self, key: str, deadline: float, *, copies: int = COPIES) -> list[Record]:
        session = self._up()
        return await self._while_up(session, session.dht.get(key, deadline, copies))

    async def peers(self) -> list[tuple[PeerId, list[str]]]:
        session = self._up()
        try:
            found = [(peer, await self._addresses_of(session, peer)) for peer in await session.connected()]
            # first those at which it has answered: what somebody typed leads back to the run
            return [(peer, list(dict.fromkeys([*self._book.get(peer, []), *said]))) for peer, said in found]
        except (PeerUnreachable, DeadlineExceeded) as error:
            raise TransportDown(f"p2pd does not respond ({error})") from error

    def neighbours(self) -> list[PeerId]:
        """The peers in the DHT's routing table, as often as they are in it. Raises `TransportDown`."""
        return self._up().dht.neighbours()

    async def remotes(self) -> dict[PeerId, list[str]]:
        session = self._up()
        try:
            return await session.remotes()
        except (PeerUnreachable, DeadlineExceeded) as error:
            raise TransportDown(f"p2pd does not respond ({error})") from error

    async def dial_back(self, peer: PeerId, port: int, deadline: float) -> str:
        session = self._up()
        if not self._dials.take_back(peer, asyncio.get_running_loop().time()):
            return ""
        return await session.dial_back(peer, port, self._whereabouts(session), deadline)

    async def restrict(self, admission: Admission, deadline: float) -> None:
        session, self._admission = self._up(), admission
        session.dht.restrict(admission)
        addresses = [address for known in self._book.values() for address in known]
        await self._while_up(session, session.join(addresses, deadline))

    async def shut_out(self, peer: PeerId) -> None:
        """See `Transport.shut_out`; does nothing while that is already under way. Raises nothing."""
        self._thirds.shut_out(peer)
        session = self._session
        if session is None or peer in self._shutting_out:
            return
        self._shutting_out.add(peer)
        try:
            await session.disconnect(peer)
        except NolocoError as error:
            logger.debug("%s is not disconnected: %s", peer, error)
        finally:
            self._shutting_out.discard(peer)

    async def _addresses_of(self, session: Session, peer: PeerId) -> list[str]:
        """The addresses a connected peer says it listens at, without what is not dialled on the word of others."""
        return dialable(await session.addresses_of(peer), self._whereabouts(session))

    async def announce(self, addresses: Sequence[str]) -> None:
        """Announce through another p2pd, with the same identity and port: one that runs cannot be told."""
        if tuple(addresses) == self._config.announce:
            return
        session = self._up()
        self._config = replace(self._config, announce=tuple(addresses))
        self._restarting = True
        self._revived.clear()
        await session.p2pd.stop()
        try:
            async with asyncio.timeout(_RESTART_DEADLINE):
                await self._revived.wait()
                assert self._rejoining is not None
                await asyncio.wait([self._rejoining])
        except TimeoutError:
            raise TransportDown("p2pd did not start again") from None

    async def close(self) -> None:
        """See `Transport.close`; takes 3 s at most, if p2pd is frozen."""
        self._session = None
        await self._supervisor.close()
        if self._latest is not None:
            await self._latest.stop()

    # --- one life of p2pd after another

    async def _new_session(self) -> Session:
        around = self._handle, lambda: self.now(), self._life, self._meter
        session = await Session.start(self._identity_path, self.peer_id, self._config, *around)
        session.refuse_by(lambda peer: self.refuses(peer), self.shut_out)
        self._latest = session
        self._thirds.begin(session.p2pd.directory)
        if self._admission is not None:
            session.dht.restrict(self._admission)
        for protocol in list(self._handlers):
            await session.serve(protocol)
        if not self._config.port:  # from now on the one that p2pd chose, if it listens
            ports = re.findall(r"/tcp/(\d+)", " ".join(session.addresses))
            self._config = replace(self._config, port=int(ports[0]) if ports else 0)
        return session

    async def _watch(self) -> None:
        """Runs forever. May be started again at any point: it goes on with the p2pd that runs, or starts one."""
        while True:
            if self._session is None:
                self._session = await self._revive()
                work, stops = self._rejoin(self._session), "Other peers will be met over time."
                self._rejoining = self._supervisor.spawn(work, "rejoining the swarm", stops)
                self._revived.set()
            await self._until_exit(self._session)

    async def _until_exit(self, session: Session) -> None:
        while not session.exited.done():
            await asyncio.wait([session.exited], timeout=_LOOK_AROUND)
            await self._look_around(session)
        self._session = None
        if not self._restarting:
            logger.warning(
                "The network process p2pd stopped (%s). Starting it again.", session.exited.result()
            )
        self._restarting = False

    async def _look_around(self, session: Session) -> None:
        try:
            await session.refresh_addresses()
            for peer in await session.connected():
                if self.refuses(peer):
                    continue  # who comes back again and again would push others out of the book
                known = self._book.get(peer) or await self._addresses_of(session, peer)
                self._book[peer] = known[:_BOOK_ADDRESSES]
            await self._leave_ways(session)
        except NolocoError as error:
            logger.debug("p2pd did not say who is connected: %s", error)

    async def _revive(self) -> Session:
        for attempt in itertools.count():
            if self._latest is not None:
                await self._latest.stop()
            try:
                return await self._new_session()
            except NolocoError as error:
                pause = doubled(0.5, attempt, _LONGEST_PAUSE)
                logger.warning("p2pd cannot be started (%s). Next attempt in %g s.", error, pause)
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _rejoin(self, session: Session) -> None:
        addresses = [address for known in self._book.values() for address in known]
        answered = await session.join(addresses, _REJOIN_DEADLINE)
        logger.info("p2pd runs again; %d of %d known peers answered.", len(answered), len(self._book))
        for key, (sealed, expires) in list(self._own_records.items()):
            if expires > self.now() and is_in_reach(expires, self.now()):
                await session.dht.put(key, sealed, self.peer_id, expires, _REJOIN_DEADLINE)

    async def _handle(self, stream: Libp2pStream, protocol: str) -> None:
        handler = self._handlers.get(protocol)
        if handler is None:
            return
        try:
            await handler(stream)
        except NolocoError as error:
            logger.debug("A stream of %s from %s ended: %s", protocol, stream.remote, error)

    def _up(self) -> Session:
        if self._session is None:
            raise TransportDown("p2pd is not running at present")
        return self._session

    def _check_still_up(self, session: Session) -> None:
        """Raise `TransportDown` when p2pd died during a call, instead of blaming the peer."""
        if self._session is not session or session.exited.done():
            raise TransportDown("p2pd stopped during the call")

    async def _while_up(self, session: Session, call: Work[T]) -> T:
        """The result of `call`; `TransportDown` as soon as p2pd dies, when hivemind would wait on."""
        task = self._supervisor.start(call)
        try:
            await asyncio.wait([task, session.exited], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # does nothing to a task that is done, and one that hangs is not waited for
        self._check_still_up(session)
        return task.result()
