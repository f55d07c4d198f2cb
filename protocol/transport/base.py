"""The interface that node code is written against.

Two implementations: `protocol.transport.libp2p` (real peers) and `bootstrap.lab.in_memory.memory` (thousands of
peers in one process under a virtual clock). One test suite, tests/transport_suite.py, runs on both.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from protocol.access.admission import Admission
from protocol.ground import Buffer, PeerId, Record
from protocol.supervision import Supervisor


class Stream(abc.ABC):
    """A reliable, ordered, bidirectional byte stream to one authenticated peer."""

    remote: PeerId

    @property
    def heard(self) -> float:
        """The loop's time at which bytes last came from the peer, asked for or not; 0 before."""
        return 0.0

    @property
    def wrote(self) -> float:
        """The loop's time at which the network last took bytes of a `write`, to about 0.2 s; 0 before."""
        return 0.0

    @property
    def is_superseded(self) -> bool:
        """True if there is a better way to the peer than this stream's by now; a new stream takes it."""
        return False

    @abc.abstractmethod
    async def read(self, size: int) -> Buffer:
        """Exactly `size` bytes, which belong to the caller. No deadline of its own.

        Raises `PeerUnreachable` when the stream ends before.
        """

    @abc.abstractmethod
    async def write(self, *buffers: Buffer) -> None:
        """Send the buffers one after another; returns when the transport has room for more.

        The buffers must stay unchanged until this returns. Raises `PeerUnreachable` when the stream is
        closed or broken; how much of the data arrived is then unknown.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close both directions; what was written before is still delivered. Idempotent."""


COPIES = (
    2  # of a large key, that `Transport.get` reads; its holders differ for a while, and one may hide records
)

Handler: TypeAlias = Callable[[Stream], Awaitable[None]]


class Transport(abc.ABC):
    """Everything a peer can do on the network. All methods run on the loop that created the object."""

    peer_id: PeerId
    ways_in: tuple[PeerId, ...] = ()  # who passes streams on to this peer, see `through`
    is_hidden = False  # nobody can dial this peer, so far as others have tried
    met_directly: frozenset[PeerId] = (
        frozenset()
    )  # hidden peers that this one, hidden too, is connected to directly
    relayed: frozenset[PeerId] = frozenset()  # peers whose streams from and to this one go through third ones
    # addresses of other peers, at which to join the run, where nobody can dial this one
    joined_through: tuple[str, ...] = ()
    refuses: Callable[[PeerId], bool] = staticmethod(
        lambda peer: False
    )  # whose streams end before they are read

    @abc.abstractmethod
    def now(self) -> float:
        """Wall-clock seconds since the epoch; virtual in the in-memory network."""

    @abc.abstractmethod
    def sign(self, data: bytes) -> bytes:
        """Sign with this peer's key; what is signed begins with a domain of its own, so that it means one thing
        alone.
        """

    def moved(self) -> tuple[int, int]:
        """Bytes sent and received since this object was made, by an interface's count; 0 where nothing is sent."""
        return 0, 0

    def limit(self, upload: float, download: float) -> None:
        """Stay below so many bytes per second from now on, by an interface's count; 0 is no limit.

        What has been handed to the network before is not called back. A network without an interface ignores it.
        """
        return

    @abc.abstractmethod
    def supervise(self, supervisor: Supervisor) -> None:
        """Let `supervisor` own the background work; call this before `start`. Without it the transport has its own.

        `close` ends what runs in it.
        """

    @abc.abstractmethod
    async def restrict(self, admission: Admission, deadline: float) -> None:
        """Limit records from now on to those that may be in the run, and let strangers to a private one see none.

        Then meet the members again, which may have taken this peer for a stranger so far.
        """

    @abc.abstractmethod
    async def shut_out(self, peer: PeerId) -> None:
        """End all connections with a peer. What it opens again is for the streams' handlers to refuse."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin to listen. Raises `ResourceError` when a port is taken, `UserError` when it cannot start."""

    @abc.abstractmethod
    def addresses(self) -> list[str]:
        """Multiaddresses, with /p2p/<peer id>, under which others may dial this peer."""

    def addresses_to_join(self) -> list[str]:
        """The addresses that others may join the run at through this peer: other peers', where none can dial it."""
        return list(self.joined_through) or self.addresses()

    @abc.abstractmethod
    async def connect(self, addresses: Sequence[str], deadline: float) -> list[PeerId]:
        """Dial each address and join the DHT through those that answer within `deadline` seconds.

        Returns the peers that answered, in no special order; an empty list when none did. May be repeated.
        """

    @abc.abstractmethod
    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Note where `peer` says that it can be dialled, as told by its signed record.

        `open` falls back on them when the network's own routing does not find the peer. Malformed ones, and those
        that nobody but the user of this machine may have dialled, are passed over (`protocol.records.addresses`).
        """

    def learn_ways(self, peer: PeerId, through: Sequence[PeerId]) -> None:
        """Note the peers that pass streams on to `peer`, which nobody can dial, as told by its signed record.

        One that names itself has found nobody to do it: only its own connections lead to it.
        """
        return

    def through(self) -> Sequence[PeerId]:
        """Return what this peer's record says of ways in: the peers that pass streams on to it.

        Where it is hidden and has found none, it names itself: only connections of its own lead to it.
        """
        return self.ways_in or ((self.peer_id,) if self.is_hidden else ())

    def goes_through_others(self, peer: PeerId) -> bool:
        """Return whether streams to `peer` have to go through a third one: nobody can dial either end.

        By the peer's record, unless a connection to it was there when a stream was last opened. Asks nobody.
        """
        return False

    def pass_on(self, rate: float) -> None:
        """Pass streams on between others from now on, at so many bytes per second; 0 passes none on."""
        return

    def keep_way_to(self, peer: PeerId) -> float:
        """Pass streams on to `peer`, which asks for it; return for how many seconds, 0 where this is refused."""
        return 0.0

    @property
    def passed_on(self) -> int:
        """Bytes passed on between others since this object was made."""
        return 0

    @abc.abstractmethod
    async def open(self, peer: PeerId, protocol: str, deadline: float, *, ahead: bool = False) -> Stream:
        """A new stream to `peer`'s handler of `protocol`.

        Raises `PeerUnreachable` (unknown, dead, or does not serve this protocol) or `DeadlineExceeded`. Returns once
        a handler has taken the stream, which takes a round trip. With `ahead` it does not wait for that: what is
        written travels with the opening, and where no handler takes it `read` raises `PeerUnreachable`, or waits.
        """

    @abc.abstractmethod
    async def serve(self, protocol: str, handler: Handler) -> None:
        """Call `handler` in a task of its own for every incoming stream of `protocol`.

        The stream is closed when the handler returns or raises.
        """

    @abc.abstractmethod
    async def put(self, key: str, value: bytes, lifetime: float, deadline: float) -> bool:
        """Sign `value` and store it in the DHT under (`key`, own peer id) for `lifetime` seconds.

        Later puts replace earlier ones. False when no peer stored it within `deadline` seconds: repeat it.
        Raises `RecordError` when the record would not pass the peers' validation.
        """

    @abc.abstractmethod
    def last_put(self, key: str) -> tuple[bytes, float] | None:
        """The record that this peer put last, sealed, and when it expires (wall clock); None before the first."""

    @abc.abstractmethod
    async def get(self, key: str, deadline: float, *, copies: int = COPIES) -> list[Record]:
        """Return all unexpired records under `key`, sorted by peer id; those that fail validation are left out.

        The key is taken as so many of its holders show it, if that is 32 records or more, else as all do together.
        Returns what was found when `deadline` seconds are over, an empty list at worst.
        """

    @abc.abstractmethod
    async def peers(self) -> list[tuple[PeerId, list[str]]]:
        """Peers connected at present with the addresses they can be dialled at: for the peer book."""

    @abc.abstractmethod
    async def remotes(self) -> dict[PeerId, list[str]]:
        """The addresses that connections come from or lead to, without /p2p/: not what peers say, and no relay's."""

    async def seen_by(self, observers: Sequence[PeerId]) -> list[str]:
        """Return the public addresses, without /p2p/, at which connected peers see this one's connections.

        One of each that answers within seconds. Raises nothing.
        """
        return []

    @abc.abstractmethod
    async def dial_back(self, peer: PeerId, port: int, deadline: float) -> str:
        """The address, without /p2p/, at which somebody like us listens on `port` of the machine that `peer`'s
        connection comes from; empty when nobody does within `deadline` seconds, no connection is known, or too much
        is asked.
        """

    @abc.abstractmethod
    async def announce(self, addresses: Sequence[str]) -> None:
        """Tell others these addresses from now on, without /p2p/, instead of those found on this machine.

        Streams that are open may break. Raises `TransportDown` when the network does not come back.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop listening, close every stream, end child processes. Idempotent."""
