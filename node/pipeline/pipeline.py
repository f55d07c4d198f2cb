"""The way of a microbatch through this stage: admission, forward, onward, backward, answer."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random

import torch

from node.context import Context
from node.model.compute import Priority
from node.model.memory_model import REMEMBERED_BATCHES
from node.model.replica import Replica
from node.model.stage_work import Load, LossAndAnswer, PendingResult, StageWork
from node.pipeline.conduct import Complaints, Conduct
from node.pipeline.deliveries import Deliveries, Passage
from node.pipeline.gate import Gate, Window
from node.pipeline.stage_client import Home, StageClient
from node.watch.trace import Track
from protocol.codec import Encoded
from protocol.errors import NonFinite, OutOfMemory, Refused
from protocol.ground import PeerId
from protocol.messages.training import Backlog, Forward, GetBacklog, Gradient, Return
from protocol.rpc import Answer, Request, Rpc

NO_ROOM_SECONDS = 1.0  # before an own microbatch that memory had no room for is tried again


class Pipeline:
    """Takes microbatches through this stage and onward, and their gradients back.

    Mutable state: the losses of this step, whether peers are served, and in a ring the own microbatches that are
    under way, with whether the head has learned from them.
    """

    def __init__(self, context: Context, replica: Replica, work: StageWork, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        self._work = work
        inner, in_flight = context.manifest.inner, replica.passes.execution.in_flight
        if context.is_last:  # forward and backward passes are one piece of work: nothing is between them
            self._gate = Gate(inner.microbatches, 0, inner.microbatches)
        else:
            self._gate = Gate(inner.microbatches, inner.staleness, in_flight)
        self._onward = StageClient(context, rng)
        self._window = Window(inner.microbatches, in_flight)
        self._deliveries = Deliveries(
            context.supervisor, REMEMBERED_BATCHES * inner.microbatches, self._new_passage
        )
        self._complaints = Complaints(context, replica)
        self._conduct = Conduct(context)  # of the stage before
        self._tries = itertools.count()
        self._losses: list[float] = []
        self._own: dict[str, bool] = {}
        self.serving = True
        self.doubt = asyncio.Event()  # something computed here was NaN: the weights may be

    # --- one inner step -----------------------------------------------------------------------

    async def batch_complete(self) -> None:
        await self._gate.complete()

    def next_step(self) -> None:
        """The weights have changed: admit what waited. Keeps the mean loss of the finished step."""
        if self._losses:
            counters = self._context.counters
            counters.loss = loss = sum(self._losses) / len(self._losses)
            counters.losses.note(self._context.view.elapsed(), loss)
        self._losses.clear()
        self._complaints.note_step()
        self._context.counters.queue = self._gate.waiting
        self._gate.next_step()

    def hold(self) -> None:
        """Send waiting microbatches elsewhere and refuse new ones until the next step.

        Those that the first stage has drawn itself stay: nobody else would take them.
        """
        if self._context.stage > 0:
            self._gate.hold()

    @property
    def is_busy(self) -> bool:
        """Whether a microbatch runs or waits here."""
        return self._gate.is_busy

    def prepare_to_leave(self) -> None:
        """Finish what others can still take; do not wait for peers that may never come."""
        self._onward.prepare_to_leave()

    @property
    def gradients_in(self) -> int:
        """How many microbatches of this step have theirs in."""
        return self._gate.gradients_in

    async def drain(self) -> None:
        """Admit nothing more from peers and wait for what is running here."""
        self.serving = False
        await self._gate.idle()

    async def close(self) -> None:
        """Give up everything that waits or runs; callers get an error."""
        self.serving = False
        self._gate.close()
        await self._deliveries.close()

    # --- training -----------------------------------------------------------------------------

    def _new_passage(self) -> Passage:
        return Passage(lambda: self._context.compute.finished)

    def serve(self, rpc: Rpc) -> None:
        """Answer the stages before this one, and in a ring the last one, from now on."""
        rpc.handle(Forward.answered_by(self.on_forward), GetBacklog.answered_by(self.on_get_backlog))
        if self._context.manifest.is_ring and self._context.stage == 0:
            rpc.handle(Return.answered_by(self.on_return))

    async def on_forward(self, request: Request[Forward]) -> Answer[Gradient]:
        """A repeated delivery joins the first one, or gets its answer again."""
        message = request.message
        self._require_served(message.stage)
        home = Home(PeerId(message.home), message.draw) if message.home else None
        name = f"{request.peer}/{message.microbatch}"
        return await self._deliveries.once(
            name, request.status, lambda passage: self._train_for(request, name, home, passage)
        )

    async def on_get_backlog(self, request: Request[GetBacklog]) -> Answer[Backlog]:
        self._require_served(request.message.stage)
        return Answer(Backlog(seconds=round(self._gate.backlog * self._seconds_each(), 6)))

    def _require_served(self, stage: int) -> None:
        if not self.serving or stage != self._context.stage or stage == 0:
            raise Refused("not-serving", f"this node serves stage {self._context.stage}")

    async def _train_for(
        self, request: Request[Forward], name: str, home: Home | None, passage: Passage
    ) -> Answer[Gradient]:
        """Like `train`; what the sender has had done is counted for receipts."""
        context, message = self._context, request.message
        loop, strike = asyncio.get_running_loop(), context.rpc.strike

        def load() -> tuple[torch.Tensor, torch.Tensor]:
            try:
                return self._work.decoded(request)
            except Refused:  # what no sound peer sends counts against its sender, until that is banned
                loop.call_soon_threadsafe(strike, request.peer)
                raise

        answer = await self.train(name, load, home, passage)
        context.ledger.note_given(request.peer)
        if message.stage == 1:
            context.ledger.note_tokens(request.peer, context.manifest.tokens_per_microbatch)
        return answer

    async def on_return(self, request: Request[Return]) -> Answer[Gradient]:
        """In a ring: the head, the loss and their gradient of what this peer has drawn, or another one has.

        It waits for nobody, as the microbatch that it is part of has its place in the step already.
        """
        message = request.message
        return await self._deliveries.once(
            f"{request.peer}/{message.microbatch}/back",
            request.status,
            lambda passage: self._come_back(request, passage),
        )

    async def draw(self, microbatch: str, load: Load) -> Answer[Gradient]:
        """An own microbatch, which nobody else would take: as `train`, again when the memory had no room for it."""
        while True:
            try:
                return await self.train(microbatch, load)
            except OutOfMemory:
                await asyncio.sleep(NO_ROOM_SECONDS)

    async def train(
        self, microbatch: str, load: Load, home: Home | None = None, passage: Passage | None = None
    ) -> Answer[Gradient]:
        """Carry one microbatch forward and backward through this stage and all later ones.

        Raises `Refused`: "busy" when the queue is full, "non-finite" and "bad-shape" for its content, here or at a
        later stage. Whatever is raised, its place in the step is free again unless its gradient is in.
        """
        context, passage = self._context, passage or self._new_passage()
        place = f"{microbatch}#{next(self._tries)}"  # given up and delivered again, it must not take its own place
        passage.queues(lambda: self._gate.before(place))
        with context.trace.waiting(Track.GATE, "wait for a place in a batch", microbatch=microbatch):
            await self._gate.enter(place)
        passage.computes()
        began = asyncio.get_running_loop().time()
        try:
            if context.is_last:
                last_stage = passage.counting(self._work.last_stage)
                landing = await context.compute.run(Priority.FORWARD, last_stage, load)
            else:
                landing = await self._train_through(microbatch, place, load, home, passage)
        except BaseException as error:
            self._gate.give_up(place)
            self._tell(error)
            raise
        finally:
            self._own.pop(microbatch, None)
        return await self._answer(place, landing, began)

    async def _answer(
        self, place: str, landing: PendingResult[LossAndAnswer], began: float
    ) -> Answer[Gradient]:
        """A microbatch whose gradient is in: it counts, also when what its sender should get cannot be sent."""
        context = self._context
        try:
            loss, answer = await landing.landed()
        except Refused as error:
            self._tell(error)
            raise
        else:
            self._losses.append(loss)
            context.counters.tokens += context.manifest.tokens_per_microbatch
            context.throughput.tokens += context.manifest.tokens_per_microbatch
        finally:
            context.counters.received += 1
            context.throughput.microbatches += 1
            self._gate.done(place)
        return self._reply(loss, answer, began)

    def _reply(self, loss: float, answer: list[Encoded], began: float) -> Answer[Gradient]:
        seconds = round(asyncio.get_running_loop().time() - began, 6)
        return Answer(
            Gradient(loss=loss, queue=self._gate.waiting, step=self._replica.step, seconds=seconds), answer
        )

    async def _train_through(
        self, microbatch: str, place: str, load: Load, home: Home | None, passage: Passage
    ) -> PendingResult[LossAndAnswer]:
        context = self._context
        if context.manifest.is_ring and context.stage == 0:
            home = Home(context.me, microbatch)
            self._own[microbatch] = False
        leaf, outputs, activations = await context.compute.run(Priority.FORWARD, self._work.forward, load)
        parcel = await activations.landed()
        sent = asyncio.get_running_loop().time()
        with context.trace.waiting(Track.GRADIENT, "wait for a gradient", microbatch=microbatch):
            loss, gradient = await self._onward.send(_name_onward(place), parcel, passage, home)
        self._adapt(asyncio.get_running_loop().time() - sent)
        with context.trace.waiting(Track.GATE, "wait for its step", microbatch=microbatch):
            passage.queues(lambda: 0)
            await self._gate.backward(place)
        passage.computes()
        backward = passage.counting(self._work.backward)
        by_inputs = await context.compute.run(Priority.BACKWARD, backward, leaf, outputs, gradient)
        return by_inputs.then(lambda answer: (loss, answer))

    async def _come_back(self, request: Request[Return], passage: Passage) -> Answer[Gradient]:
        """The first delivery of an own microbatch teaches the head; a resent one came along another way."""
        context, message, began = self._context, request.message, asyncio.get_running_loop().time()
        is_own = message.home == context.me and message.draw in self._own
        if not (self.serving or is_own):
            raise Refused("not-serving", f"this node no longer serves stage {context.stage}")
        learns = is_own and not self._own[message.draw]
        if learns:
            self._own[message.draw] = True
        passage.computes()
        head = passage.counting(self._work.head)
        try:
            landing = await context.compute.run(
                Priority.BACKWARD, head, lambda: self._work.decoded(request, is_back=True), learns
            )
        except BaseException as error:
            if learns and message.draw in self._own:
                self._own[message.draw] = False
            self._tell(error)
            raise
        return self._reply(*await landing.landed(), began)

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, NonFinite):
            self._complaints.note(error)
            if not error.overflows:
                self.doubt.set()

    def _adapt(self, seconds: float) -> None:
        """A gradient came back after `seconds`: as many microbatches in flight as hide such a time."""
        fitting = self._replica.passes.execution.in_flight  # fewer than at the start where memory ran out
        self._gate.allow(min(fitting, self._window.in_flight(seconds, self._seconds_each())))

    def _seconds_each(self) -> float:
        """That this device computes for a microbatch, mean so far."""
        context = self._context
        return context.compute.busy.seconds() / (context.throughput.microbatches + 1)


def _name_onward(place: str) -> str:
    """What the next stage knows these activations by: the same name for others would get the answer to these."""
    return hashlib.blake2b(place.encode(), digest_size=24).hexdigest()
