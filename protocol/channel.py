"""One stream to or from a peer: frames written one at a time, replies matched to requests by their number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protocol.codec import Encoded
from protocol.errors import NolocoError, PeerUnreachable, TransportDown, WireError
from protocol.frames import Frame, FrameType, FrameWatch, read_frame, write_frame
from protocol.messages import Message
from protocol.transport.base import Stream

logger = logging.getLogger(__name__)

# What a frame has at least once it has begun, whatever the deadline of its request: cut short, it ends the stream and
# with it every other request under way.
FRAME_SECONDS = 10.0


@dataclass
class Channel:
    """Either side of one stream of one class of traffic; only the calling side has requests that wait.

    Mutable state: the requests that wait for their replies, the next one's number, whether the stream is of no use
    any more, and the task that reads replies.
    """

    stream: Stream
    traffic: str
    watch: FrameWatch
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: dict[int, asyncio.Future[Frame]] = field(default_factory=dict)
    next_id: int = 0
    broken: bool = False
    reader: asyncio.Task[None] | None = None

    # --- calling ------------------------------------------------------------------------------

    async def ask(self, request: Message, tensors: Sequence[Encoded], due: float) -> Frame:
        """Send a request and wait for its reply or refusal until `due` on the loop's clock.

        Raises what ended the stream, and `TimeoutError`: at `due`, or if the request was half sent then, once it is
        sent.
        """
        request_id = self.next_id
        self.next_id += 1
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.waiting[request_id] = future
        try:
            await self.send(FrameType.REQUEST, request_id, request, tensors, due)
            async with asyncio.timeout_at(due):
                return await future
        finally:
            self.waiting.pop(request_id, None)
            if future.done() and not future.cancelled():
                future.exception()  # seen, also when sending failed first

    async def read_replies(self, max_payload: int, breached: Callable[[], None]) -> None:
        """Hand out replies until the stream ends; calls `breached` when it ends with a malformed one."""
        reason: NolocoError = PeerUnreachable("the stream was closed")
        try:
            while True:
                frame = await self.read(max_payload)
                future = self.waiting.pop(frame.request_id, None)
                if future is not None and not future.done():
                    future.set_result(frame)
        except NolocoError as error:
            reason = error
            if isinstance(error, WireError):
                breached()
        finally:
            self.fail(reason)

    # --- frames -------------------------------------------------------------------------------

    async def send(
        self,
        frame_type: FrameType,
        request_id: int,
        message: Message,
        tensors: Sequence[Encoded],
        due: float | None = None,
    ) -> None:
        """Write one frame. Raises `TimeoutError` when its turn has not come by `due`: nothing of it was sent then.

        One that has begun gets `FRAME_SECONDS` at least. What is cut short after them, or because its task is
        cancelled, leaves the stream out of step and closes it.
        """
        async with self._turn(due):
            began = self.watch.now()
            ends = None if due is None else max(due, asyncio.get_running_loop().time() + FRAME_SECONDS)
            try:
                async with asyncio.timeout_at(ends):
                    nbytes = await write_frame(
                        self.stream, frame_type, request_id, message.kind, message.model_dump(), tensors
                    )
            except BaseException:
                self.fail(PeerUnreachable("the stream broke while sending"))
                raise
            self.watch.sent(self.traffic, self.stream.remote, message.kind, nbytes, began)

    @asynccontextmanager
    async def _turn(self, due: float | None = None) -> AsyncIterator[None]:
        """The stream for one frame, once those before are out. Raises as `send`, when it does not come."""
        async with asyncio.timeout_at(due):
            await self.write_lock.acquire()
        try:
            if self.broken:
                raise PeerUnreachable("the stream was closed")
            yield
        finally:
            self.write_lock.release()

    async def refuse(self, request: Frame, code: str, reason: str) -> None:
        """Answer `request` with a refusal; a peer that cannot be reached any more does without."""
        try:
            async with self._turn():
                await write_frame(self.stream, FrameType.REFUSAL, request.request_id, code, reason[:200])
        except (PeerUnreachable, TransportDown):
            logger.debug("A refusal could not be sent")

    async def read(self, max_payload: int) -> Frame:
        frame = await read_frame(self.stream, max_payload, self.watch)
        self.watch.received(self.traffic, self.stream.remote, frame.kind, len(frame.payload), frame.began)
        return frame

    # --- the end ------------------------------------------------------------------------------

    def close(self, reason: NolocoError) -> None:
        """End the stream from this side; the requests that wait raise `reason`."""
        if self.reader is not None:
            self.reader.cancel()
        self.fail(reason)

    def fail(self, reason: NolocoError) -> None:
        self.broken = True
        self.stream.close()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(reason)
        self.waiting.clear()
