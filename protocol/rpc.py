"""Requests and replies over persistent streams: many in flight, one stream per peer and class of traffic.

Classes keep a small message from waiting behind bulk data, and give each its own bound on a frame's payload.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import torch

from protocol.answering import Answering
from protocol.channel import Channel
from protocol.codec import Encoded
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused, TransportDown, WireError, legible
from protocol.frames import UNWATCHED, Frame, FrameType, FrameWatch
from protocol.messages import Answer as Answer
from protocol.messages import Asks, Done, Handler, Message, Status
from protocol.messages import Request as Request
from protocol.messages import Traffic as Traffic
from protocol.patience import Patience
from protocol.peer_limits import Bans, RequestLimiter
from protocol.supervision import Supervisor
from protocol.transport.base import PeerId, Stream, Transport

logger = logging.getLogger(__name__)

MAX_STREAMS_PER_PEER = 8
DEFAULT_PAYLOADS: dict[Traffic, int] = dict.fromkeys(Traffic, 1024 * 1024)
Reply = TypeVar("Reply", bound=Message)


class Rpc:
    """Both sides of the conversation of one peer with all others.

    Mutable state: one outgoing channel per (peer, traffic), the answers under way, and the strikes of peers that
    broke the protocol.

    What one peer makes this one hold is bounded, whether or not it reads its answers. For each class of traffic:
    `places_for(payload)` requests with their answers, and one more request for each of its streams, of which
    there are at most `MAX_STREAMS_PER_PEER` in all.
    """

    def __init__(
        self,
        transport: Transport,
        payloads: dict[Traffic, int] | None = None,
        watch: FrameWatch = UNWATCHED,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.transport = transport
        self._supervisor = supervisor or Supervisor()
        self._watch = watch
        self._payloads = DEFAULT_PAYLOADS | (payloads or {})
        self._handlers: dict[tuple[Traffic, str], Handler] = {}
        self._channels: dict[tuple[PeerId, Traffic], Channel] = {}
        # for as long as somebody waits for the channel
        self._opening = WeakValueDictionary[tuple[PeerId, Traffic], asyncio.Lock]()
        self._streams_from = Counter[PeerId]()
        # for as long as a stream or an answer under way holds them: a peer that closes its streams and comes back
        # finds no fresh places
        self._places = WeakValueDictionary[tuple[PeerId, Traffic], RequestLimiter]()
        self._bans = Bans()

    def handle(self, *handlers: Handler) -> None:
        """Answer these requests from now on, see `Asks.answered_by`; a later handler replaces an earlier one."""
        for handler in handlers:
            self._handlers[handler.traffic, handler.kind] = handler

    def stop_handling(self, *traffic: Traffic) -> None:
        """Refuse every request of these classes as "unknown-request", until there are handlers again."""
        for key in [key for key in self._handlers if key[0] in traffic]:
            del self._handlers[key]

    def limit(self, payloads: dict[Traffic, int]) -> None:
        """Set payload bounds once the manifest, which they follow from, is known."""
        self._payloads |= payloads

    async def start(self) -> None:
        for traffic in Traffic:
            await self.transport.serve(traffic.protocol, partial(self._serve, traffic))

    async def close(self) -> None:
        for channel in list(self._channels.values()):
            channel.close(TransportDown("this node is leaving"))
        self._channels.clear()
        await self._supervisor.close()

    # --- calling ------------------------------------------------------------------------------

    async def call(
        self,
        peer: PeerId,
        request: Asks[Reply],
        tensors: Sequence[Encoded] = (),
        *,
        deadline: float | Patience,
        traffic: Traffic | None = None,
    ) -> tuple[Reply, list[torch.Tensor]]:
        """Ask `peer` and wait for its answer: `deadline` seconds, or for work as long as a `Patience` lasts.

        The request travels in its own class of traffic, unless another one is named.
        Raises `Refused` (nothing was done), `PeerUnreachable` or `DeadlineExceeded` (after the deadline, or up to
        `protocol.patience.FRAME_SECONDS` more where the request is half sent by then; it may have been carried out,
        so repeat only what is harmless when repeated), `WireError` when the answer is nonsense (counts against the
        peer). Work that is given up, also by cancelling this, is not begun any more over there.
        """
        traffic = traffic or request.traffic
        patience = deadline if isinstance(deadline, Patience) else Patience(deadline)
        try:
            async with asyncio.timeout(patience.seconds):
                channel = await self._channel(peer, traffic, patience.seconds)
            frame = await channel.ask(request, tensors, patience, partial(self._give_up, traffic, channel))
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {request.kind} within {patience.seconds:.1f} s") from None
        try:
            return _checked_reply(frame, request.reply())
        except WireError:
            self.strike(peer)
            raise

    async def _channel(self, peer: PeerId, traffic: Traffic, deadline: float) -> Channel:
        async with self._opening.setdefault((peer, traffic), asyncio.Lock()):
            channel = self._channels.get((peer, traffic))
            if channel is None or channel.broken:
                channel = await self._open(peer, traffic, deadline)
            return channel

    async def _open(self, peer: PeerId, traffic: Traffic, deadline: float) -> Channel:
        key = (peer, traffic)
        channel = Channel(await self.transport.open(peer, traffic.protocol, deadline), traffic, self._watch)
        reading = channel.read_replies(self._payloads[traffic], partial(self.strike, peer))
        channel.reader = self._supervisor.spawn(reading, "reading answers")
        self._channels[key] = channel
        channel.reader.add_done_callback(lambda _: self._drop(key, channel))
        return channel

    def _give_up(self, traffic: Traffic, channel: Channel, number: int) -> None:
        if traffic.is_work:
            telling = channel.tell(FrameType.CANCEL, number, Done())
            self._supervisor.spawn(telling, "giving a request up", "It is computed in vain.")

    def _drop(self, key: tuple[PeerId, Traffic], channel: Channel) -> None:
        """The stream ended: keep nothing for a peer that may never come back."""
        if self._channels.get(key) is channel:
            del self._channels[key]

    def forget(self, peer: PeerId) -> None:
        """Close the channels to a peer that left, so that nothing is kept for it."""
        for traffic in Traffic:
            channel = self._channels.pop((peer, traffic), None)
            if channel is not None:
                channel.close(PeerUnreachable("the peer left"))

    # --- answering ----------------------------------------------------------------------------

    async def _serve(self, traffic: Traffic, stream: Stream) -> None:
        peer = stream.remote
        if self.is_banned(peer) or self._streams_from[peer] >= MAX_STREAMS_PER_PEER:
            return
        self._streams_from[peer] += 1
        answering = Answering(
            Channel(stream, traffic, self._watch),
            partial(self._dispatch, peer, traffic),
            partial(self.strike, peer),
            self._places.setdefault((peer, traffic), RequestLimiter()),
            self._supervisor,
        )
        try:
            while not self.is_banned(peer):
                await answering.take(self._payloads[traffic], tells=traffic.is_work)
        except WireError as error:
            logger.warning("Peer %s sent something malformed: %s", peer[-8:], error)
            self.strike(peer)
        except PeerUnreachable:
            logger.debug("Peer %s closed its %s stream", peer[-8:], traffic)
        finally:
            answering.end()
            self._streams_from[peer] -= 1
            if not self._streams_from[peer]:
                del self._streams_from[peer]

    async def _dispatch(
        self, peer: PeerId, traffic: Traffic, frame: Frame, status: Status
    ) -> Answer[Message]:
        if frame.type is not FrameType.REQUEST:
            raise WireError("a reply came where requests are expected")
        handler = self._handlers.get((traffic, frame.kind))
        if handler is None:
            raise Refused("unknown-request", frame.kind[:40])
        return await handler.dispatch(peer, frame, status)

    # --- defence ------------------------------------------------------------------------------

    def strike(self, peer: PeerId) -> None:
        """Count a breach of protocol; after too many the peer is ignored for a while."""
        self._bans.strike(peer, asyncio.get_running_loop().time())

    def is_banned(self, peer: PeerId) -> bool:
        return self._bans.is_banned(peer, asyncio.get_running_loop().time())


def _checked_reply(frame: Frame, reply: type[Reply]) -> tuple[Reply, list[torch.Tensor]]:
    if frame.type is FrameType.REFUSAL:
        reason = frame.body if isinstance(frame.body, str) else ""
        raise Refused(legible(frame.kind[:40]), legible(reason[:200]))
    if frame.type is not FrameType.REPLY or frame.kind != reply.kind:
        raise WireError(f"expected {reply.kind}, got {legible(frame.kind[:40])}")
    return reply.parsed(frame.body), frame.tensors()
