"""The answering side of one stream: each request gets a place, and long ones tell how far they are meanwhile.

What its caller gave up is cancelled, and so is everything that was asked on a stream that ended: nobody would read
the answer. A handler decides what that means for work that has begun.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from protocol.errors import (
    MALFORMED,
    NodeFailed,
    NolocoError,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.messages import Answer, Message, Progress, Status
from protocol.messages.frame import Frame, FrameType
from protocol.rpc.channel import HALF_FRAME_SECONDS, Channel, slowest_seconds
from protocol.rpc.patience import Patience
from protocol.supervision import Supervisor
from protocol.windows import short, window

logger = logging.getLogger(__name__)

# between two signs of life; a round trip and one that is late are still below five seconds
PROGRESS_SECONDS = 1.5
QUEUED = Progress(state="queued")


@dataclass
class Underway:
    """A request of which the header has come and the answer has not been sent."""

    since: float  # on the loop's clock
    status: Status = field(default_factory=Status)
    task: asyncio.Task[None] | None = None  # None until it has a place
    gave_way: bool = False  # its place is somebody else's now
    is_answered: bool = False  # and the answer is on its way: cut short, it would end the stream

    def give_way(self) -> bool:
        """End the request, as others wait for its place; returns whether it was not answered already."""
        if self.task is None or self.is_answered or self.gave_way:
            return False
        self.gave_way = True
        self.task.cancel()
        return True


# waits for a place; `give_way` may be called while it is taken, and the result gives it back
TakePlace: TypeAlias = Callable[[Callable[[], bool]], Awaitable[Callable[[], None]]]


@dataclass
class Answering:
    """Answers the requests of one stream: bounds how many run at once and sends progress for long ones.

    Mutable state: the requests under way, how many came, and whether somebody tells how far they are.
    """

    channel: Channel
    dispatch: Callable[[Frame, Status], Awaitable[Answer[Message]]]
    strike: Callable[[], None]
    take_place: TakePlace
    supervisor: Supervisor
    underway: dict[int, Underway] = field(default_factory=dict)
    asked: int = 0  # requests that came and that nobody has given up
    telling: bool = False

    @window
    def __repr__(self) -> str:
        peer, traffic = short(self.channel.stream.remote), self.channel.traffic
        return (
            f"Peer: {peer} | Traffic: {traffic} | Requests: {len(self.underway)} told of, {self.asked} asked"
        )

    async def take(self, most: Callable[[int], Awaitable[int]], tells: bool) -> None:
        """Take the stream's next frame. Nothing more is read while all places are taken, so the peer has to wait.

        With `tells` it is told how far the request is, and may give it up. `most` and errors as in `Channel.read`.
        """
        frame = await self.channel.read(most, self._began_to_come if tells else lambda *_: None)
        if frame.type is FrameType.CANCEL:
            if not (tells and self.asked):
                raise WireError("something is given up that was not asked for")
            self.asked -= 1
            self._give_up(frame.request_id)
            return
        self.asked += 1
        underway = self.underway.get(frame.request_id, Underway(0.0))
        underway.status.look = lambda: QUEUED
        try:
            give_back = await self.take_place(underway.give_way)
        except BaseException:
            self.underway.pop(frame.request_id, None)
            raise
        underway.task = self.supervisor.spawn(self._answer(frame, underway), "answering a request")

        def ended(_: asyncio.Task[None]) -> None:
            underway.task = None  # else its exception, which knows this frame, would keep both
            give_back()

        underway.task.add_done_callback(ended)

    def end(self) -> None:
        """Give up what was asked with `tells`: the stream has ended, and nobody waits for it."""
        self.channel.broken = True
        for number in list(self.underway):
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        underway = self.underway.pop(number, None)
        if underway is not None and underway.task is not None:
            underway.task.cancel()

    def _began_to_come(self, frame_type: FrameType, number: int) -> None:
        if frame_type is not FrameType.REQUEST:
            return
        if number in self.underway:
            raise WireError("two requests under way have the same number")
        self.underway[number] = Underway(asyncio.get_running_loop().time())
        if not self.telling:
            self.telling = True
            self.supervisor.spawn(self._tell(), "telling how far requests are")

    async def _tell(self) -> None:
        """Tell how far requests are until nothing is under way any more."""
        loop = asyncio.get_running_loop()
        try:
            while self.underway and not self.channel.broken:
                await asyncio.sleep(PROGRESS_SECONDS)
                for number, underway in list(self.underway.items()):
                    if loop.time() - underway.since >= PROGRESS_SECONDS and number in self.underway:
                        await self.channel.tell(FrameType.PROGRESS, number, underway.status.look())
        finally:
            self.telling = False

    async def _answer(self, frame: Frame, underway: Underway) -> None:
        channel = self.channel
        try:
            answer = await self._handled(frame, underway)
        except asyncio.CancelledError:
            if not underway.gave_way:
                raise
            await channel.refuse(frame, "busy", "others wait for what you have had for long; ask again later")
        except Refused as refusal:
            await channel.refuse(frame, refusal.code, refusal.reason)
        except WireError as error:
            self.strike()
            await channel.refuse(frame, MALFORMED, str(error)[:200])
        except NodeFailed as failure:
            self.supervisor.end_node(failure)  # it would refuse everybody, and go on to be asked
            await channel.refuse(frame, "failed", "this node ends")
        except NolocoError as error:
            await channel.refuse(frame, "failed", str(error))
        except Exception:
            # A bug of ours must not end the stream, and its text may hold paths: it stays in our own log.
            logger.exception("Failed to answer %s", frame.kind)
            await channel.refuse(frame, "internal", "")
        else:
            nbytes = sum(tensor.nbytes for tensor in answer.tensors)
            # of bytes that nobody takes, and of those that are taken one by one
            patience = Patience(HALF_FRAME_SECONDS, math.inf, most=slowest_seconds(nbytes))
            try:
                await channel.send(
                    FrameType.REPLY, frame.request_id, answer.message, answer.tensors, patience
                )
            except (PeerUnreachable, TransportDown, TimeoutError):
                logger.debug("The answer to %s could not be sent", frame.kind)

    async def _handled(self, frame: Frame, underway: Underway) -> Answer[Message]:
        try:
            return await self.dispatch(frame, underway.status)
        finally:  # from here on it is not cancelled: an answer cut short would end the stream
            underway.is_answered = True
            self.underway.pop(frame.request_id, None)
