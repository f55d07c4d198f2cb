"""Direct connections between two peers behind home routers, which they arrange through a third peer.

A router lets in what answers something that went out. So the peer that is asked begins a connection to where the
asker is seen from outside, from the port that it listens on, and the asker's p2pd dials from its port, too: each
router takes the other end's SYN for an answer (RFC 793, 3.4, simultaneous open; RFC 5128, 3.4; RFC 5382, REQ-1 and
REQ-2). Two peers do not meet so where a router gives each destination another port.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgpack

from protocol.access.peer_limits import Allowance
from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable, UserError
from protocol.ground import Buffer, PeerId
from protocol.records.addresses import check_address, host_of, is_private
from protocol.supervision import all_of
from protocol.transport.base import Stream
from protocol.transport.relayed_stream import read_frame, write_frame
from protocol.windows import counted, window

logger = logging.getLogger(__name__)

SEEN_AT = "/noloco/seen-at/1"  # to a connected peer: at which address are this peer's connections seen?
PUNCH = "/noloco/punch/1"  # through a third peer: connect to these addresses, and answer with your own
MOST_SEEN = 2  # addresses of one peer: a machine may have two ways out
MOST_BYTES = 256  # of the frame with them
STAYS = 20.0  # seconds for which a peer takes itself to be seen at the same addresses
DEADLINE = 5.0  # seconds for each answer
DIALLED = 5.0  # seconds for the connection: three SYNs of p2pd's
ASKED_OFTEN = (8, 8 / 60), (60, 1.0)  # answers at once and a second, to each peer and to all
# the same of meetings that others ask for: each has both observers asked, which answer `ASKED_OFTEN`
MET_OFTEN = (4, 4 / 60), (8, 8 / 60)

Opens = Callable[[PeerId, str, float], Awaitable[Stream]]


@dataclass(frozen=True)
class Around:
    """What a peer's transport does for its punching."""

    observers: Callable[[], Sequence[PeerId]]  # connected peers outside of this one's network
    port: Callable[[], int]  # that p2pd listens on
    open_connected: Opens  # a stream to a connected peer
    open_through: Opens  # a stream through a third peer
    remotes: Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]  # see `Transport.remotes`
    take: Callable[[PeerId, Sequence[str]], list[str]]  # the addresses, with /p2p/, that may be dialled now
    dial: Callable[[PeerId, list[str], float], Awaitable[bool]]
    # Begin a connection to an address, with /p2p/, and let p2pd have it once it is there; return the port that it
    # comes from: the one that p2pd listens on, or another one. Raises `OSError`
    begin: Callable[[str], int]


class Punching:
    """Arranges direct connections to peers that nobody can dial, as nobody can dial this one.

    Mutable state: how many times it was asked to begin a connection, where this peer was seen of late and until when
    that counts, and how often answers may still be given and meetings asked for.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._asked = 0
        self._seen, self._seen_until = list[str](), 0.0
        self._answers, self._meetings = Allowance(*ASKED_OFTEN), Allowance(*MET_OFTEN)

    @window
    def __repr__(self) -> str:
        return f"Asked to connect: {counted(self._asked, 'time')}"

    async def meet(self, peer: PeerId) -> bool:
        """Arrange a connection with the peer and dial it; return whether it is there. Raises no `NolocoError`.

        Of two peers only one may ask: where the p2pd of both dial, TLS has two callers and fails. Takes 25 s at
        most and may be repeated.
        """
        try:
            if not (own := await self.seen_at()):
                return False
            theirs = await self._exchanged(peer, own)
            logger.debug("Meeting %s, which is seen at %s, from %s", peer, theirs, own)
            addresses = self._around.take(peer, _others(theirs, own))
            return bool(addresses) and await self._around.dial(peer, addresses, DIALLED)
        except NolocoError as error:
            logger.debug("No direct connection to %s: %s", peer, error)
            return False

    async def seen_at(self) -> list[str]:
        """Return the public addresses, without /p2p/, at which others may find what this peer listens on.

        They are where its observers see its connections, and the port that it listens on at the same host: most
        routers keep ports, and p2pd dials from another one where it was connected to the same peer a moment before.
        """
        now = asyncio.get_running_loop().time()
        if self._seen and now < self._seen_until:
            return self._seen
        seen = await self.seen_by(list(self._around.observers())[:MOST_SEEN])
        kept = [f"{address.rpartition('/')[0]}/{self._around.port()}" for address in seen]
        self._seen, self._seen_until = list(dict.fromkeys([*kept[:1], *seen]))[:MOST_SEEN], now + STAYS
        return self._seen

    async def seen_by(self, observers: Sequence[PeerId]) -> list[str]:
        """Return the public addresses at which connected peers see this one, one of each that answers."""
        return [some[0] for some in await all_of(*map(self._seen_by, observers)) if some]

    async def on_seen_at(self, stream: Stream) -> None:
        """Answer at which addresses the peer's connections are seen."""
        if self._answers.take(stream.remote, 1, asyncio.get_running_loop().time()):
            places = (await self._around.remotes()).get(stream.remote, ())
            await write_frame(stream, _packed(places))

    async def on_punch(self, stream: Stream) -> None:
        """Begin connections to the addresses at which the peer is seen, and answer with this peer's."""
        if not self._meetings.take(stream.remote, 1, asyncio.get_running_loop().time()):
            return
        theirs = await _addresses_from(stream)
        self._asked += 1
        own = await self.seen_at()
        logger.debug("%s wants to meet from %s; this peer is seen at %s", stream.remote, theirs, own)
        begun = list[str]()
        for address in self._around.take(stream.remote, _others(theirs, own)) if own else []:
            try:
                begun.append(f"{own[0].rpartition('/')[0]}/{self._around.begin(address)}")
            except OSError as error:
                logger.debug("No SYN goes to %s: %s", address, error)
        await write_frame(stream, _packed(list(dict.fromkeys([*begun, *own]))))

    async def _exchanged(self, peer: PeerId, own: Sequence[str]) -> list[str]:
        stream = await self._around.open_through(peer, PUNCH, DEADLINE)
        try:
            await write_frame(stream, _packed(own))
            return await _addresses_from(stream, 2 * DEADLINE)
        finally:
            stream.close()

    async def _seen_by(self, observer: PeerId) -> list[str]:
        try:
            stream = await self._around.open_connected(observer, SEEN_AT, DEADLINE)
            try:
                return await _addresses_from(stream)
            finally:
                stream.close()
        except NolocoError as error:
            logger.debug("%s does not say where it sees this peer: %s", observer, error)
            return []


def _others(theirs: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return a peer's addresses without those at which this one is seen: it would connect with itself."""
    return [address for address in theirs if address not in own]


def _packed(addresses: Sequence[str]) -> bytes:
    packed: bytes = msgpack.packb(list(addresses)[:MOST_SEEN])
    return packed


def _usable(address: object, peer: PeerId) -> bool:
    """Return whether a text is /ip4|ip6/HOST/tcp/PORT with a public host.

    It is neither a name, nor another transport, nor a relay's, nor a place in this machine's own network.
    """
    try:
        return (
            isinstance(address, str)
            and check_address(f"{address}/p2p/{peer}") == f"{address}/p2p/{peer}"
            and host_of(address) is not None
            and not is_private(address)
        )
    except UserError:
        return False


async def _addresses_from(stream: Stream, deadline: float = DEADLINE) -> list[str]:
    """Read a frame of addresses, without /p2p/; unusable ones are passed over. Raises as `Transport.open`."""
    try:
        async with asyncio.timeout(deadline):
            return read_addresses(await read_frame(stream, MOST_BYTES), stream.remote)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.remote} names no address") from error


def read_addresses(raw: Buffer, sender: PeerId) -> list[str]:
    """Return the usable addresses in a frame. Raises `PeerUnreachable` for what is no list."""
    try:
        found = msgpack.unpackb(bytes(raw))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise PeerUnreachable(f"{sender} sent no addresses") from error
    if not isinstance(found, list):
        raise PeerUnreachable(f"{sender} sent no addresses")
    return [address for address in found[:MOST_SEEN] if _usable(address, sender)]
