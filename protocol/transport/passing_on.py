"""Passes streams on between two peers that cannot dial each other, within a bound, counted as all that it sends.

libp2p's own relays end a connection after 128 KiB, or carry without a bound and uncounted what strangers send, as
p2pd decides (docs/links.md). Here a peer that is willing passes frames on, for peers that asked it to and stay
connected; it cannot read them (`protocol.transport.relayed_stream`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgpack

from protocol.access.peer_limits import PeerTable
from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable
from protocol.ground import Buffer, PeerId
from protocol.records.identity import is_peer_id
from protocol.supervision import all_of
from protocol.transport.base import Stream
from protocol.transport.metering import Bucket
from protocol.transport.relayed_stream import read_frame, write_frame
from protocol.windows import amount, counted, window

PASS_ON = "/noloco/pass-on/1"  # to the peer between: pass this stream on
PASSED_ON = "/noloco/passed-on/1"  # from it, to the other end
MOST_ASKED = 512  # bytes of the frame that says to whom, or from whom
MOST_PROTOCOL = 128  # letters
MOST_STREAMS = 256  # passed on at a time
MOST_OF_PEER = 32  # of them, from one peer
MOST_PEERS = 128  # that streams are passed on to
KEPT_SECONDS = 600.0  # for which a peer that asked is passed streams on to, unless it asks again
IDLE_SECONDS = 600.0  # without a frame either way, after which a stream is ended
OPENING_SECONDS = 10.0

Opens = Callable[[PeerId, str, float], Awaitable[Stream]]


@dataclass(frozen=True)
class Asked:
    """What the first frame says: the peer at the other end, and the protocol that the stream is of."""

    peer: PeerId
    protocol: str

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb([self.peer, self.protocol])
        return packed

    @classmethod
    def read(cls, raw: Buffer, sender: PeerId) -> Asked:
        """Raises `PeerUnreachable` for anything else."""
        try:
            peer, protocol = msgpack.unpackb(bytes(raw))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise PeerUnreachable(f"{sender} asked for a stream to nobody") from error
        is_named = isinstance(peer, str) and is_peer_id(peer)
        if not is_named or not isinstance(protocol, str) or len(protocol) > MOST_PROTOCOL:
            raise PeerUnreachable(f"{sender} asked for a stream to nobody")
        return cls(PeerId(peer), protocol)


class PassingOn:
    """What one peer passes on.

    Mutable state: the peers that asked for it and until when, the streams under way, and the bytes passed on.
    """

    def __init__(self, opens: Opens, clock: Callable[[], float]) -> None:
        """`opens` a stream to a peer that is connected, within seconds, and never dials; `clock` is the loop's."""
        self._opens = opens
        self._clock = clock
        self._bucket: Bucket | None = None  # before it was willing
        self._is_willing = False
        self._until = PeerTable[float](MOST_PEERS)
        self._from = Counter[PeerId]()
        self.nbytes = 0

    @window
    def __repr__(self) -> str:
        if not self._is_willing:
            return "Passes nothing on"
        under_way = counted(self._from.total(), "stream")
        return f"For: {counted(len(self._until), 'peer')} | Under way: {under_way} | Passed on: {amount(self.nbytes)}"

    def limit(self, rate: float) -> None:
        """Pass on so many bytes per second from now on, all streams together; 0 is none at all."""
        self._is_willing = rate > 0
        if self._bucket is not None:
            self._bucket.limit(rate)
        elif rate > 0:
            self._bucket = Bucket(rate, self._clock)

    def keep_for(self, peer: PeerId) -> float:
        """Pass streams on to `peer` from now on; returns for how many seconds, 0 where that is refused."""
        now = self._clock()
        for gone in [other for other, until in self._until.items() if until < now]:
            del self._until[gone]
        if not self._is_willing or (peer not in self._until and len(self._until) >= MOST_PEERS):
            return 0.0
        self._until[peer] = now + KEPT_SECONDS
        return KEPT_SECONDS

    async def pass_on(self, stream: Stream) -> None:
        """Pass a stream on until either end closes it. Raises `PeerUnreachable` where it is refused."""
        if self._from.total() >= MOST_STREAMS or self._from[stream.remote] >= MOST_OF_PEER:
            raise PeerUnreachable("as many streams are passed on as may be")
        self._from[stream.remote] += 1
        try:
            asked = await asked_of(stream, OPENING_SECONDS)
            if not self._is_willing or self._until.get(asked.peer, 0.0) < self._clock():
                raise PeerUnreachable(f"no stream is passed on to {asked.peer}: it has not asked for that")
            onward = await self._opens(asked.peer, PASSED_ON, OPENING_SECONDS)
            try:
                await write_frame(onward, Asked(stream.remote, asked.protocol).to_bytes())
                with suppress(PeerUnreachable, DeadlineExceeded):
                    await all_of(self._pump(stream, onward), self._pump(onward, stream))
            finally:
                onward.close()
        finally:
            self._from[stream.remote] -= 1
            self._from += Counter()  # forget those that have none
            stream.close()

    async def _pump(self, source: Stream, target: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    body = await read_frame(source)
            except TimeoutError as error:
                raise DeadlineExceeded("nothing was passed on for long") from error
            self.nbytes += len(body)
            if self._bucket is not None and (wait := self._bucket.take(len(body))):
                await asyncio.sleep(wait)
            await write_frame(target, body)


async def asked_of(stream: Stream, deadline: float) -> Asked:
    """Read the first frame of a stream: whom it is to be passed on to, or from whom it has been.

    Of the latter the peer between says it, and the certificate that follows proves it. Raises as `Transport.open`.
    """
    try:
        async with asyncio.timeout(deadline):
            return Asked.read(await read_frame(stream, MOST_ASKED), stream.remote)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.remote} does not say whose the stream is") from error


async def ask_to_pass_on(stream: Stream, peer: PeerId, protocol: str) -> None:
    """Ask the peer at the other end of `stream` to pass it on to `peer`. Raises `NolocoError`."""
    try:
        await write_frame(stream, Asked(peer, protocol).to_bytes())
    except NolocoError:
        stream.close()
        raise
