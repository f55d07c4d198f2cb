"""Streams to and from peers that cannot be dialled, through third ones, and what this peer passes on for others."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

from protocol.access.peer_limits import Allowance, PeerTable
from protocol.errors import DeadlineExceeded, PeerUnreachable
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.transport.base import Handler, Stream
from protocol.transport.passing_on import PASS_ON, PASSED_ON, PassingOn, ask_to_pass_on, asked_of
from protocol.transport.relayed_stream import Certificate, RelayedStream, answer_through, call_through
from protocol.windows import counted, window

logger = logging.getLogger(__name__)

PASSING_DEADLINE = 10.0  # seconds for a third peer to pass a stream on, and for its other end to answer
REST = 60.0  # seconds for which a peer through which no stream came is the last that is tried
MOST_KNOWN = 4_096  # peers of which it is known who passes streams on to them

# Streams that are passed on to this peer, at once and a second, by each peer and by all: to prove who is at the other
# end takes 2 ms of a core
BEGUN = (32, 4.0), (128, 32.0)

Opens = Callable[[PeerId, str, float], Awaitable[Stream]]


class ThirdPeers:
    """A peer's dealings with third ones.

    Mutable state: who passes streams on to which peers, which of these are connected all the same, through whom none
    came and until when they rest, the relayed streams that are open, and the certificate for
    them, which lies in the folder of the p2pd that runs.
    """

    def __init__(
        self,
        identity: Identity,
        opens: Opens,
        opens_onward: Opens,
        handlers: Mapping[str, Handler],
        refuses: Callable[[PeerId], bool],
    ) -> None:
        """`opens` a stream and dials for it, `opens_onward` does to a peer that is connected alone.

        `handlers` are of all protocols that are served here.
        """
        self.passing = PassingOn(opens_onward, _now)
        self._begun = Allowance(*BEGUN)
        self._identity = identity
        self._opens = opens
        self._handlers = handlers
        self._refuses = refuses
        self._certificate: Certificate | None = None
        self._ways = PeerTable[list[PeerId]](MOST_KNOWN)
        self._open = PeerTable[WeakSet[RelayedStream]](MOST_KNOWN)
        self._rests = PeerTable[float](MOST_KNOWN)
        self._direct = PeerTable[bool](MOST_KNOWN)
        self._rng = random.Random(f"{identity.peer_id}/third peers")

    @window
    def __repr__(self) -> str:
        return f"Ways to: {counted(len(self._ways), 'peer')} | {self.passing}"

    def begin(self, folder: Path) -> None:
        """Keep the certificate in this folder, where only this user may look."""
        try:
            self._certificate = Certificate(self._identity, folder / "relayed.pem")
        except OSError as error:
            self._certificate = None
            logger.warning(
                "No stream goes through other peers: the certificate cannot be written (%s).", error
            )

    def learn(self, peer: PeerId, through: Sequence[PeerId]) -> None:
        """See `Transport.learn_ways`."""
        if through:
            self._ways[peer] = [
                between for between in through if between not in (peer, self._identity.peer_id)
            ]
        else:
            self._ways.pop(peer, None)
            self._direct.pop(peer, None)

    def calls_itself_hidden(self, peer: PeerId) -> bool:
        """Return whether the peer's record says that nobody can dial it."""
        return peer in self._ways

    def ways_to(self, peer: PeerId) -> list[PeerId]:
        """The peers that pass streams on to this one; none where it can be dialled, or has found none."""
        return self._ways.get(peer, [])

    def note_direct(self, peer: PeerId, *, is_direct: bool) -> None:
        """Note whether there was a connection to a hidden peer when a stream to it was opened."""
        self._direct[peer] = is_direct

    def is_needed_for(self, peer: PeerId) -> bool:
        """Return whether streams from a hidden peer to this one go through others, so far as is known."""
        return peer in self._ways and not self._direct.get(peer, False)

    def _in_order(self, peer: PeerId, protocol: str, now: float) -> list[PeerId]:
        """The ways to a peer, the one to try first at the front.

        Those through which nothing came of late are the last: their ends may not have noticed yet. Of the others the
        one through which fewer streams of the protocol go here, since those of one protocol carry about as much.
        """
        carry = Counter(
            s.through for streams in self._open.values() for s in streams if s.protocol == protocol
        )
        ways = list(self.ways_to(peer))
        self._rng.shuffle(ways)
        return sorted(ways, key=lambda one: (self._rests.get(one, 0.0) > now, carry[one]))

    async def open(self, peer: PeerId, protocol: str, deadline: float) -> RelayedStream:
        """A stream through the first peer that passes it on. Raises `PeerUnreachable`."""
        clock, failure = asyncio.get_running_loop().time, "nobody passes streams on to it"
        ends = clock() + deadline
        for between in self._in_order(peer, protocol, clock()):
            own, left = self._certificate, min(PASSING_DEADLINE, ends - clock())
            if own is None or left <= 0:
                break
            try:
                carrier = await self._opens(between, PASS_ON, left)
                await ask_to_pass_on(carrier, peer, protocol)
                return self._noted(await call_through(carrier, peer, own, left), protocol)
            except (PeerUnreachable, DeadlineExceeded) as error:
                self._rests[between] = clock() + REST
                failure = f"through {between}: {error}"
        raise PeerUnreachable(f"{peer} cannot be reached {failure}")

    async def on_pass_on(self, stream: Stream) -> None:
        """Pass on a stream of a peer that asks for it."""
        await self.passing.pass_on(stream)

    async def on_passed_on(self, stream: Stream) -> None:
        """Take a stream that a peer passes on: who is at its other end is proved before anything is answered."""
        if not self._begun.take(stream.remote, 1, _now()):
            return
        asked = await asked_of(stream, PASSING_DEADLINE)
        handler, own = self._handlers.get(asked.protocol), self._certificate
        if (
            handler is None
            or own is None
            or asked.protocol in (PASS_ON, PASSED_ON)
            or self._refuses(asked.peer)
        ):
            return
        relayed = await answer_through(stream, asked.peer, own, PASSING_DEADLINE)
        self._noted(relayed, asked.protocol)
        try:
            await handler(relayed)
        finally:
            relayed.close()

    def _noted(self, stream: RelayedStream, protocol: str) -> RelayedStream:
        stream.protocol = protocol
        here = self._open.get(stream.remote)
        if here is None:
            here = self._open[stream.remote] = WeakSet()
        here.add(stream)
        return stream

    def relayed(self) -> list[PeerId]:
        """The peers at the other ends of the streams that go through others."""
        for peer in [peer for peer, streams in self._open.items() if not streams]:
            del self._open[peer]
        return list(self._open)

    def supersede(self, peer: PeerId) -> None:
        """Note that there is a direct connection to the peer: what begins on these streams' behalf takes it."""
        for stream in list(self._open.get(peer, ())):
            stream.supersede()

    def shut_out(self, peer: PeerId) -> None:
        """Close the streams from and to `peer` that go through others."""
        for stream in list(self._open.pop(peer, ())):
            stream.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
