"""One stream to or from a peer: frames written one at a time, replies matched to requests by their number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from protocol.codecs.codec import Encoded
from protocol.errors import NolocoError, PeerUnreachable, TransportDown, WireError
from protocol.messages import Message, Progress
from protocol.messages.frame import Frame, FrameType
from protocol.rpc.frames import FrameWatch, read_frame, read_prefix, write_frame
from protocol.rpc.patience import FRAME_SECONDS, Patience
from protocol.supervision import until
from protocol.transport.base import Stream
from protocol.windows import short, window

logger = logging.getLogger(__name__)

# A frame that has begun takes memory: so long it may stand still, and so long it may take in all.
HALF_FRAME_SECONDS = 30.0
SLOWEST_SECONDS = 60.0
SLOWEST_RATE = 32_768  # bytes a second


@dataclass
class Channel:
    """Either side of one stream of one class of traffic; only the calling side has requests that wait.

    Mutable state: the requests that wait for their replies, the next one's number, when the last one began, whether
    the stream is of no use any more, and the task that reads replies. Of requests that were given up: how many may
    still be answered, and the signs of their progress that may still come.
    """

    stream: Stream
    traffic: str
    watch: FrameWatch
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: dict[int, tuple[asyncio.Future[Frame], Patience]] = field(default_factory=dict)
    next_id: int = 0
    late: int = 0
    late_signs: float = 0.0
    used: float = 0.0  # by the loop's clock
    broken: bool = False
    reader: asyncio.Task[None] | None = None

    @window
    def __repr__(self) -> str:
        state = "broken" if self.broken else "open"
        requests = f"{len(self.waiting)} waiting, {self.next_id} asked"
        return f"Peer: {short(self.stream.remote)} | Traffic: {self.traffic}, {state} | Requests: {requests}"

    async def ask(
        self,
        request: Message,
        tensors: Sequence[Encoded],
        patience: Patience,
        given_up: Callable[[int], None] = lambda _: None,
    ) -> Frame:
        """Send a request and wait for its reply or refusal as long as `patience` lasts.

        Raises what ended the stream, and `TimeoutError` when the patience ends, or if the request was half sent then,
        once it is sent. `given_up` is called with its number when nobody waits any more for a request that was sent.
        """
        request_id = self.next_id
        self.next_id += 1
        self.used = asyncio.get_running_loop().time()
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.waiting[request_id] = future, patience
        is_sent = False
        try:
            await self.send(FrameType.REQUEST, request_id, request, tensors, patience)
            patience.sent()
            is_sent = True
            async with until(lambda: patience.due(self.stream.heard)):
                frame = await future
            patience.heard()
            return frame
        finally:
            self.waiting.pop(request_id, None)
            if future.done() and not future.cancelled():
                future.exception()  # seen, also when sending failed first
            elif is_sent and not self.broken:
                self.late += 1
                self.late_signs += patience.signs_left
                given_up(request_id)

    async def read_replies(self, max_payload: int, breached: Callable[[], None]) -> None:
        """Hand out replies until the stream ends; calls `breached` when it ends with a malformed one."""
        reason: NolocoError = PeerUnreachable("the stream was closed")

        async def most(nbytes: int) -> int:
            return max_payload

        try:
            while True:
                # nothing of it is named here: it would be kept until the next one comes, with all that waited for it
                self._hand_out(await self.read(most))
        except NolocoError as error:
            reason = error
            if isinstance(error, WireError):
                breached()
        finally:
            self.fail(reason)

    def _hand_out(self, frame: Frame) -> None:
        """Hand a frame to the call that waits for it. Raises `WireError` for a frame that no call asked for."""
        if frame.type is FrameType.PROGRESS:
            self._note_progress(frame)
        elif waiting := self.waiting.pop(frame.request_id, None):
            if not waiting[0].done():
                waiting[0].set_result(frame)
        elif self.late:
            self.late -= 1
        else:
            raise WireError("an answer to nothing that was asked")

    def _note_progress(self, frame: Frame) -> None:
        if frame.kind != Progress.kind or frame.specs:
            raise WireError("progress of another kind")
        progress = Progress.parsed(frame.body)
        if (waiting := self.waiting.get(frame.request_id)) is not None:
            left = waiting[1].signs_left
            waiting[1].note(progress)
        else:
            left = self.late_signs
            self.late_signs -= 1
        if left < 1:
            raise WireError("signs of progress without end")

    async def send(
        self,
        frame_type: FrameType,
        request_id: int,
        message: Message,
        tensors: Sequence[Encoded],
        patience: Patience | None = None,
    ) -> None:
        """Write one frame. Raises `TimeoutError` when patience ends before its turn: nothing of it was sent then.

        One that has begun gets `FRAME_SECONDS` at least. What is cut short after them, or because its task is
        cancelled, leaves the stream out of step and closes it.
        """
        async with self._turn(patience):
            began, start = self.watch.now(), asyncio.get_running_loop().time()
            try:
                async with _limit(patience, lambda lasting: lasting.frame_due(start, self._moved())):
                    frame = frame_type, request_id, message.kind, message.told(), tensors
                    nbytes = await write_frame(self.stream, *frame)
            except BaseException:
                self.fail(PeerUnreachable("the stream broke while sending"))
                raise
            self.watch.sent(self.traffic, self.stream.remote, message.kind, nbytes, began)

    def _moved(self) -> float:
        """The time at which bytes last moved, either way."""
        return max(self.stream.wrote, self.stream.heard)

    @asynccontextmanager
    async def _turn(self, patience: Patience | None = None) -> AsyncIterator[None]:
        """Hold the stream for one frame, once those before are out. Raises like `send` when that takes too long."""
        async with _limit(patience, lambda waiting: waiting.due(self._moved())):
            await self.write_lock.acquire()
        try:
            if self.broken:
                raise PeerUnreachable("the stream was closed")
            yield
        finally:
            self.write_lock.release()

    async def refuse(self, request: Frame, code: str, reason: str) -> None:
        """Answer `request` with a refusal, which is dropped if the peer can no longer be reached."""
        try:
            async with self._turn():
                began = self.watch.now()
                frame = FrameType.REFUSAL, request.request_id, code, reason[:200]
                nbytes = await write_frame(self.stream, *frame)
                self.watch.sent(self.traffic, self.stream.remote, code, nbytes, began)
        except (PeerUnreachable, TransportDown):
            logger.debug("A refusal could not be sent")

    async def tell(self, frame_type: FrameType, request_id: int, message: Message) -> None:
        """Send a short frame that nobody answers. If it cannot be sent, it is dropped."""
        try:
            await self.send(frame_type, request_id, message, (), Patience(FRAME_SECONDS))
        except (PeerUnreachable, TransportDown, TimeoutError):
            logger.debug("A %s frame could not be sent", frame_type.name.lower())

    async def read(
        self,
        most: Callable[[int], Awaitable[int]],
        began_to_come: Callable[[FrameType, int], None] = lambda *_: None,
    ) -> Frame:
        """The next frame, of at most `most(bytes that are announced)` bytes, which may wait until there is room.

        Raises what `read_frame` and `most` raise, and `PeerUnreachable` when a frame that has begun stands still.
        """
        stream = self.stream
        prefix = await read_prefix(stream, self.watch)
        max_payload = await most(prefix.payload_bytes)
        started = asyncio.get_running_loop().time()
        last = started + slowest_seconds(prefix.payload_bytes)
        try:
            async with until(lambda: min(max(started, stream.heard) + HALF_FRAME_SECONDS, last)):
                frame = await read_frame(stream, max_payload, began_to_come, prefix)
        except TimeoutError:
            raise PeerUnreachable("a frame came so far and no further") from None
        self.watch.received(self.traffic, self.stream.remote, frame.kind, len(frame.payload), frame.began)
        return frame

    def close(self, reason: NolocoError) -> None:
        """End the stream from this side; the requests that wait raise `reason`."""
        if self.reader is not None:
            self.reader.cancel()
        self.fail(reason)

    def fail(self, reason: NolocoError) -> None:
        self.broken = True
        self.stream.close()
        for answer, _ in self.waiting.values():
            if not answer.done():
                answer.set_exception(reason)
        self.waiting.clear()


def slowest_seconds(nbytes: int) -> float:
    """Return the seconds that a frame with so large a payload may take in all, either way."""
    return SLOWEST_SECONDS + nbytes / SLOWEST_RATE


def _limit(
    patience: Patience | None, due: Callable[[Patience], float]
) -> AbstractAsyncContextManager[None, bool | None]:
    """Limit a block as `until` does; what nobody waits for has no limit."""
    return nullcontext() if patience is None else until(lambda: due(patience))
