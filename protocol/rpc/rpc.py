"""Requests and replies over persistent streams: many in flight, one stream per peer and class of traffic.

Classes keep a small message from waiting behind bulk data, and give each its own bound on a frame's payload.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import torch

from protocol.access.peer_limits import (
    FRUITLESS,
    INFLOW_FEWEST,
    LARGE,
    Allowance,
    Bans,
    Inflow,
    RequestLimiter,
    places_for,
)
from protocol.codecs.codec import Encoded, require_finite
from protocol.errors import (
    MALFORMED,
    DeadlineExceeded,
    NolocoError,
    PeerUnreachable,
    Refused,
    TransportDown,
    UnknownField,
    Unreadable,
    WireError,
    legible,
)
from protocol.ground import PeerId
from protocol.messages import KINDS, Asker, Asks, Done, Handler, Message, Status
from protocol.messages import Answer as Answer
from protocol.messages import Request as Request
from protocol.messages import Traffic as Traffic
from protocol.messages.frame import Frame, FrameType
from protocol.messages.layouts import require_layouts
from protocol.messages.peers import Introduce
from protocol.rpc.answering import Answering, TakePlace
from protocol.rpc.channel import Channel
from protocol.rpc.compatibility import serve_version
from protocol.rpc.door import STRANGER, VISITOR_BYTES, Door
from protocol.rpc.frames import UNWATCHED, FrameWatch
from protocol.rpc.introductions import Introductions
from protocol.rpc.patience import Patience
from protocol.supervision import Supervisor
from protocol.transport.base import Stream, Transport
from protocol.windows import amount, counted, short, window

logger = logging.getLogger(__name__)

MAX_STREAMS_PER_PEER = 8
IDLE_SECONDS = 300.0  # without a request, after which a stream is closed when another one is opened
MOVING_PAUSE = 0.5  # seconds between two looks at whether an old stream is of use any more
DEFAULT_PAYLOADS: dict[Traffic, int] = dict.fromkeys(Traffic, 1024 * 1024)
Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")


class Rpc:
    """Both sides of the conversation of one peer with all others.

    Mutable state: one outgoing channel per (peer, traffic), the answers under way, and the strikes of peers that
    broke the protocol. Without a `door` everybody is answered.

    What one peer makes this one hold is bounded, whether or not it reads its answers. For each class of traffic:
    `places_for(payload)` requests with their answers, and one more request for each of its streams, of which
    there are at most `MAX_STREAMS_PER_PEER` in all. Large requests of all peers on their way share an `Inflow`.
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
        self._moving = set[
            PeerId
        ]()  # whose requests go over a better stream while an older one is still answered
        self._streams_from: dict[PeerId, set[Stream]] = {}
        # for as long as a stream or an answer under way holds them: a peer that closes its streams and comes back
        # finds no fresh places
        self._places = WeakValueDictionary[tuple[PeerId, Traffic], RequestLimiter]()
        self._inflow = Inflow(INFLOW_FEWEST)
        self._bans = Bans()
        self.unreadable = Counter[
            tuple[str, str]
        ]()  # answers, by what was asked and what reading them raised
        self._fruitless = Allowance(*FRUITLESS)
        self.introductions = Introductions(
            transport.now, partial(self._ask, read=_unchanged), self._supervisor
        )
        self._door: Door | None = None

    @window
    def __repr__(self) -> str:
        channels = f"{len(self._channels)} open, {len(self._opening)} opening"
        held = f"{len(self._places)} held | Coming: {amount(self.coming)}"
        return (
            f"Peer: {short(self.transport.peer_id)} | Channels: {channels} | Streams: "
            f"of {counted(len(self._streams_from), 'peer')} | Places: {held} | Tasks: {self._supervisor.running()}"
        )

    @property
    def introduction(self) -> Introduce | None:
        """What this peer shows of itself, once it has a record."""
        return self.introductions.own

    @introduction.setter
    def introduction(self, own: Introduce | None) -> None:
        self.introductions.own = own

    @property
    def channels(self) -> list[Channel]:
        """The channels open to others at present."""
        return list(self._channels.values())

    @property
    def coming(self) -> int:
        """Bytes of the large requests that are on their way here."""
        return self._inflow.taken

    def streams_of(self, peer: PeerId) -> int:
        """The number of streams that the peer opened and that are read here."""
        return len(self._streams_from.get(peer, ()))

    def handle(self, *handlers: Handler) -> None:
        """Answer these requests from now on, see `Asks.answered_by`; a later handler replaces an earlier one."""
        for handler in handlers:
            self._handlers[handler.traffic, handler.kind] = handler

    def stop_handling(self, *what: Traffic | type[Message]) -> None:
        """Refuse these requests, and all of these classes, as "unknown-request", until there are handlers again."""
        kinds = {each if isinstance(each, Traffic) else each.kind for each in what}
        for traffic, kind in [key for key in self._handlers if not kinds.isdisjoint(key)]:
            del self._handlers[traffic, kind]

    def limit(self, payloads: dict[Traffic, int]) -> None:
        """Set payload bounds once the manifest, which they follow from, is known."""
        self._payloads |= payloads
        self._inflow.most = max(INFLOW_FEWEST, 4 * max(self._payloads.values()))

    def open_door(self, door: Door) -> None:
        """Answer only whom it admits from now on."""
        self._door = door
        self.handle(*(Introduce.answered_by(door.on_introduce, traffic) for traffic in Traffic))

    async def start(self) -> None:
        self.transport.refuses = self.is_banned
        await serve_version(self.transport)
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
        """Ask `peer` and return the reply and its tensors. See `call_and_read`."""
        return await self.call_and_read(
            peer, request, tensors, read=_unchanged, deadline=deadline, traffic=traffic
        )

    async def call_and_read(
        self,
        peer: PeerId,
        request: Asks[Reply],
        tensors: Sequence[Encoded] = (),
        *,
        read: Callable[[Reply, list[torch.Tensor]], T],
        deadline: float | Patience,
        traffic: Traffic | None = None,
    ) -> T:
        """Ask `peer` and return what `read` makes of its answer.

        `read` gets the reply, which fits the request (`Asks.require_fit`), and its tensors, which are of the
        request's `layouts` and finite. It may raise `WireError` for an answer that does not fit; whatever else it
        raises is a refusal as `Unreadable`. So an answer fails its own request, and nothing else.

        `deadline` is in seconds, or as long as a `Patience` lasts. The request travels in its own class of traffic,
        unless another one is named.
        Raises `Refused` (nothing was done), `PeerUnreachable` or `DeadlineExceeded` (after the deadline, or up to
        `rpc.patience.FRAME_SECONDS` more where the request is half sent by then; it may have been carried out,
        so repeat only what is harmless when repeated), `WireError` when the answer is nonsense (counts against the
        peer). Work that is given up, also by cancelling this, is not begun any more over there.
        """
        traffic = traffic or request.traffic
        patience = deadline if isinstance(deadline, Patience) else Patience(deadline)
        # more than a visitor may send, or of what members get more than visitors
        if traffic is Traffic.STATE or _is_large(tensors):
            await self.introductions.make(peer, patience.seconds)
        else:
            await self.introductions.make_ahead(peer, patience.seconds, request.asker, traffic)
        try:
            return await self._ask(peer, request, tensors, patience, traffic, read)
        except Refused as refusal:
            if refusal.code != STRANGER or self.introduction is None:
                raise
        await self.introductions.make(peer, patience.seconds, again=True)
        return await self._ask(peer, request, tensors, patience, traffic, read)

    async def _ask(
        self,
        peer: PeerId,
        request: Asks[Reply],
        tensors: Sequence[Encoded],
        patience: Patience,
        traffic: Traffic,
        read: Callable[[Reply, list[torch.Tensor]], T],
    ) -> T:
        try:
            async with asyncio.timeout(patience.seconds):
                channel = await self._channel(peer, traffic, patience.seconds, ahead=not _is_large(tensors))
            frame = await channel.ask(request, tensors, patience, partial(self._give_up, traffic, channel))
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {request.kind} within {patience.seconds:.1f} s") from None
        return self._read(peer, frame, request, tensors, read)

    def _read(
        self,
        peer: PeerId,
        frame: Frame,
        request: Asks[Reply],
        sent: Sequence[Encoded],
        read: Callable[[Reply, list[torch.Tensor]], T],
    ) -> T:
        """Return what `read` makes of an answer. Every answer passes here, and nothing else reads one."""
        try:
            return read(*_checked_reply(frame, request, sent))
        except WireError:
            self.strike(peer)
            raise
        except NolocoError:
            raise
        except Exception as failure:
            # A bug of ours, or too little memory: it must not end more than this request, and blames nobody.
            self.unreadable[request.kind, type(failure).__name__] += 1
            if self.unreadable[request.kind, type(failure).__name__] == 1:
                logger.exception("Failed to read the answer of peer %s to %s", peer[-8:], request.kind)
            raise Unreadable(request.kind, failure) from None

    async def _channel(self, peer: PeerId, traffic: Traffic, deadline: float, *, ahead: bool) -> Channel:
        async with self._opening.setdefault((peer, traffic), asyncio.Lock()):
            channel = self._channels.get((peer, traffic))
            if channel is None or channel.broken:
                return await self._open(peer, traffic, deadline, ahead)
            if channel.stream.is_superseded and peer not in self._moving:
                with suppress(PeerUnreachable, DeadlineExceeded):
                    better = await self._open(peer, traffic, deadline, ahead)
                    self._moving.add(peer)
                    self._supervisor.spawn(
                        self._end_once_idle(peer, channel), "leaving a stream for a better one"
                    )
                    return better
            return channel

    async def _end_once_idle(self, peer: PeerId, channel: Channel) -> None:
        """End a channel once nothing waits for an answer on it. One of a peer at a time: its places are few."""
        try:
            while answers := [answer for answer, _ in channel.waiting.values()]:
                await asyncio.wait(answers, timeout=MOVING_PAUSE)
            channel.close(PeerUnreachable("there is a better stream"))
        finally:
            self._moving.discard(peer)

    async def _open(self, peer: PeerId, traffic: Traffic, deadline: float, ahead: bool) -> Channel:
        """A channel over a new stream; `ahead` of the other's word, where what follows may be sent in vain."""
        key = (peer, traffic)
        self._close_idle()
        stream = await self.transport.open(peer, traffic.protocol, deadline, ahead=ahead)
        channel = Channel(stream, traffic, self._watch)
        reading = channel.read_replies(self._payloads[traffic], partial(self.strike, peer))
        channel.reader = self._supervisor.spawn(reading, "reading answers")
        self._channels[key] = channel
        channel.reader.add_done_callback(lambda _: self._drop(key, channel))
        return channel

    def _close_idle(self) -> None:
        """Close idle channels, so that streams do not add up to all peers ever met."""
        now = asyncio.get_running_loop().time()
        for key, channel in list(self._channels.items()):
            if not channel.waiting and now - channel.used > IDLE_SECONDS:
                channel.close(PeerUnreachable("the stream was idle"))
                self._drop(key, channel)

    def _give_up(self, traffic: Traffic, channel: Channel, number: int) -> None:
        if traffic.is_work:
            telling = channel.tell(FrameType.CANCEL, number, Done())
            self._supervisor.spawn(telling, "giving a request up", "It is computed in vain.")

    def _drop(self, key: tuple[PeerId, Traffic], channel: Channel) -> None:
        """Drop a channel whose stream ended: keep nothing for a peer that may never come back."""
        if self._channels.get(key) is channel:
            del self._channels[key]
            self.introductions.forget(key[0])  # who comes back may not know this one any more

    async def shut_out(self, peer: PeerId) -> None:
        """End every stream with a peer, and the connection."""
        self.forget(peer)
        for stream in list(self._streams_from.get(peer, ())):
            stream.close()
        await self.transport.shut_out(peer)

    def forget(self, peer: PeerId) -> None:
        """Close the channels to a peer that left, so that nothing is kept for it."""
        self.introductions.forget(peer)
        for traffic in Traffic:
            channel = self._channels.pop((peer, traffic), None)
            if channel is not None:
                channel.close(PeerUnreachable("the peer left"))

    # --- answering ----------------------------------------------------------------------------

    async def _serve(self, traffic: Traffic, stream: Stream) -> None:
        peer = stream.remote
        streams = self._streams_from.get(peer, set())
        if self.is_banned(peer):
            return
        if len(streams) >= MAX_STREAMS_PER_PEER:
            self._note_fruitless(peer)
            return
        self._streams_from[peer] = streams
        streams.add(stream)
        if self._door is not None:
            self._door.enter(stream)
        answering = Answering(
            Channel(stream, traffic, self._watch),
            partial(self._dispatch, peer, traffic),
            partial(self.strike, peer),
            self._taking_places(peer, traffic),
            self._supervisor,
        )
        brought = False  # anything
        try:
            while not self.is_banned(peer):
                await answering.take(partial(self._most, stream, traffic), tells=traffic.is_work)
                brought = True
                self._inflow.leave(stream)
        except WireError as error:
            logger.warning("Peer %s sent something malformed: %s", peer[-8:], error)
            self.strike(peer)
        except PeerUnreachable:
            logger.debug("Peer %s closed its %s stream", peer[-8:], traffic)
            if not brought and not (self._door is not None and self._door.has_ended(stream)):
                self._note_fruitless(peer)
        finally:
            answering.end()
            self._inflow.leave(stream)
            if self._door is not None:
                self._door.leave(stream)
            streams.discard(stream)
            if not streams:
                self._streams_from.pop(peer, None)
                if self._door is not None:
                    self._door.note_gone(peer)

    def _taking_places(self, peer: PeerId, traffic: Traffic) -> TakePlace:
        shared = self._door.places(peer, traffic) if self._door is not None else None
        if shared is not None:
            return partial(shared.take, peer)
        own, most = (
            self._places.setdefault((peer, traffic), RequestLimiter()),
            places_for(self._payloads[traffic]),
        )

        async def take(give_way: Callable[[], bool]) -> Callable[[], None]:
            await own.take(most)
            return own.give_back

        return take

    async def _most(self, stream: Stream, traffic: Traffic, nbytes: int) -> int:
        most = self._payloads[traffic]
        if self._door is not None:
            most = self._door.bound(stream.remote, most, nbytes)
        if LARGE < nbytes <= most:
            await self._inflow.enter(stream, nbytes)
        return most

    async def _dispatch(
        self, peer: PeerId, traffic: Traffic, frame: Frame, status: Status
    ) -> Answer[Message]:
        if frame.type is not FrameType.REQUEST:
            raise WireError("a reply came where requests are expected")
        handler = self._handlers.get((traffic, frame.kind))
        if (
            handler is not None
        ):  # before the door: who sends garbage is never one who has only not been met yet
            try:
                request = handler.opened(peer, frame, status)
            except UnknownField as later:  # a later version's, and what it asks for would not be done
                self._note_fruitless(peer)
                raise Refused(MALFORMED, str(later)) from None
        elif frame.kind not in KINDS and not (self._door is not None and self._door.knows(peer)):
            self._note_fruitless(peer)
        if self._door is not None:
            asked = (handler.asker, handler.kind) if handler is not None else (Asker.ANYBODY, "")
            await self._door.admit(peer, *asked)
        if handler is None:
            raise Refused("unknown-request", frame.kind[:40])
        answer = await handler.answer(request)
        if self._door is not None:
            self._door.note_answer(peer, answer.nbytes)
        return answer

    # --- defence ------------------------------------------------------------------------------

    def strike(self, peer: PeerId) -> None:
        """Count a breach of protocol; after too many the peer is ignored for a while."""
        if self._bans.strike(peer, asyncio.get_running_loop().time()):
            self._supervisor.spawn(self.shut_out(peer), "ending the connection with a peer that is banned")

    def _note_fruitless(self, peer: PeerId) -> None:
        """Count as a breach what is one only when it comes again and again."""
        if not self._fruitless.take(peer, 1, asyncio.get_running_loop().time()):
            self.strike(peer)

    def is_banned(self, peer: PeerId) -> bool:
        return self._bans.is_banned(peer, asyncio.get_running_loop().time())


def _is_large(tensors: Sequence[Encoded]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) > VISITOR_BYTES // 2


def _unchanged(reply: Reply, tensors: list[torch.Tensor]) -> tuple[Reply, list[torch.Tensor]]:
    return reply, tensors


def _checked_reply(
    frame: Frame, request: Asks[Reply], sent: Sequence[Encoded]
) -> tuple[Reply, list[torch.Tensor]]:
    reply = request.reply()
    if frame.type is FrameType.REFUSAL:
        reason = frame.body if isinstance(frame.body, str) else ""
        raise Refused(legible(frame.kind[:40]), legible(reason[:200]))
    if frame.type is not FrameType.REPLY or frame.kind != reply.kind:
        raise WireError(f"expected {reply.kind}, got {legible(frame.kind[:40])}")
    message = reply.parsed(frame.body)
    require_layouts(frame.specs, request.layouts(sent))
    request.require_fit(message, sent)
    return message, [require_finite(tensor) for tensor in frame.tensors()]
