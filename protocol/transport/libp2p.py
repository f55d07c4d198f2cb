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
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from protocol.addresses import check_address, peer_id_in
from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable, TransportDown, UserError
from protocol.identity import Identity
from protocol.peer_limits import PeerTable
from protocol.records import expiry, is_in_reach, key_digest, open_record, seal_record
from protocol.supervision import Supervisor, Work
from protocol.transport.base import Handler, PeerId, Record, Stream, Transport
from protocol.transport.libp2p_session import Libp2pStream, Session
from protocol.transport.p2pd import Libp2pConfig

__all__ = ["Libp2pConfig", "Libp2pTransport"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULTS = Libp2pConfig()
# Seconds between two looks at who is connected. After p2pd died, the others' p2pd refuse to dial this peer for
# 5 s once an attempt has failed; whom this peer knows, it dials itself at once.
_LOOK_AROUND = 3.0
_LEARNED_PEERS = 4_096
_LEARNED_ADDRESSES = 8
_BOOK_SIZE = 64  # peers redialled at most; the DHT knows the others
_BOOK_ADDRESSES = 4  # of each
_REJOIN_DEADLINE = 15.0  # seconds
_RESTART_DEADLINE = 30.0  # seconds for p2pd to be up again and to have dialled whom it knew
_LONGEST_PAUSE = 30.0  # seconds between attempts to restart p2pd
WATCHDOG = "watching the network process"


class Libp2pTransport(Transport):
    """One peer, with the key in the file `identity_path`. Raises `StateError` when that cannot be read."""

    def __init__(self, identity_path: Path, config: Libp2pConfig = _DEFAULTS) -> None:
        self._identity = Identity.load(identity_path)
        self.peer_id = self._identity.peer_id
        self._identity_path = identity_path
        self._config = config  # with the real port, once it is known
        self._session: Session | None = None  # None while p2pd is down
        self._latest: Session | None = None  # the last one started, to be stopped in any case
        self._handlers: dict[str, Handler] = {}
        self._book = PeerTable[list[str]](_BOOK_SIZE)  # addresses of peers met, the latest last
        self._learned = PeerTable[list[str]](_LEARNED_PEERS)  # from the peers' own records
        self._own_records: dict[str, tuple[bytes, float]] = {}  # key -> (sealed, expires)
        self._restarting = False  # p2pd has been stopped on purpose
        self._revived = asyncio.Event()  # and runs again
        self._rejoining: asyncio.Task[None] | None = None
        self.supervise(Supervisor())

    def supervise(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._life = supervisor.group()  # of one p2pd after another

    def now(self) -> float:
        return time.time()

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
        return answered

    async def open(self, peer: PeerId, protocol: str, deadline: float) -> Stream:
        session = self._up()
        try:
            return await self._open(session, peer, protocol, deadline)
        except PeerUnreachable as error:
            self._check_still_up(session)
            raise PeerUnreachable(f"{peer} cannot be reached for {protocol}: {error}") from error
        except DeadlineExceeded as error:
            self._check_still_up(session)
            raise DeadlineExceeded(f"{peer} did not accept {protocol} within {deadline:g} s") from error

    async def _open(self, session: Session, peer: PeerId, protocol: str, deadline: float) -> Libp2pStream:
        """A stream; when libp2p's routing does not find the peer, through the addresses of its own record."""
        ends = asyncio.get_running_loop().time() + deadline
        try:
            return await session.open(peer, protocol, deadline)
        except PeerUnreachable:
            addresses = self._learned.get(peer, [])
            if not await session.dial_any(peer, addresses, ends - asyncio.get_running_loop().time()):
                raise
        return await session.open(peer, protocol, ends - asyncio.get_running_loop().time())

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        usable = []
        for address in addresses[:_LEARNED_ADDRESSES]:
            try:
                if peer_id_in(check_address(address)) == peer:
                    usable.append(address)
            except UserError as problem:
                logger.debug("The record of %s names a bad address: %s", peer, problem)
        self._learned[peer] = usable

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler
        if self._session is not None:
            await self._session.serve(protocol)

    async def put(self, key: str, value: bytes, lifetime: float, deadline: float) -> bool:
        session = self._up()
        _, last_expiry = self._own_records.get(key, (b"", 0.0))
        expires = expiry(self.now(), lifetime, last_expiry)
        sealed = seal_record(self._identity, key, value, expires)
        open_record(key_digest(key), self.peer_id, sealed, expires, self.now())
        self._own_records[key] = (sealed, expires)
        return await self._while_up(session, session.dht.put(key, sealed, self.peer_id, expires, deadline))

    async def get(self, key: str, deadline: float) -> list[Record]:
        session = self._up()
        return await self._while_up(session, session.dht.get(key, deadline))

    async def peers(self) -> list[tuple[PeerId, list[str]]]:
        session = self._up()
        try:
            return [(peer, await session.addresses_of(peer)) for peer in await session.connected()]
        except (PeerUnreachable, DeadlineExceeded) as error:
            raise TransportDown(f"p2pd does not respond ({error})") from error

    async def dial_back(self, peer: PeerId, port: int, deadline: float) -> str:
        return await self._up().dial_back(peer, port, deadline)

    async def announce(self, addresses: Sequence[str]) -> None:
        """Takes another p2pd, with the same identity and port: one that runs cannot be told."""
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
        """As `Transport.close`; takes 3 s at most, if p2pd is frozen."""
        self._session = None
        await self._supervisor.close()
        if self._latest is not None:
            await self._latest.stop()

    # --- one life of p2pd after another

    async def _new_session(self) -> Session:
        session = await Session.start(
            self._identity_path, self.peer_id, self._config, self._handle, lambda: self.now(), self._life
        )
        self._latest = session
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
                known = self._book.get(peer) or await session.addresses_of(peer)
                self._book[peer] = known[:_BOOK_ADDRESSES]
        except NolocoError as error:
            logger.debug("p2pd did not say who is connected: %s", error)

    async def _revive(self) -> Session:
        for attempt in itertools.count():
            if self._latest is not None:
                await self._latest.stop()
            try:
                return await self._new_session()
            except NolocoError as error:
                pause = min(_LONGEST_PAUSE, 0.5 * 2**attempt)
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
        """A call that was under way when p2pd died says so, instead of blaming the peer."""
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
