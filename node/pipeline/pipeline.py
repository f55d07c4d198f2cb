"""Takes a microbatch through this stage: admission, forward, onward, backward, answer."""

from __future__ import annotations

import asyncio
import itertools
import math
import random

from node.context import Context
from node.data.batches import Batch
from node.model.compute import Priority
from node.model.memory_model import REMEMBERED_BATCHES
from node.model.replica import Replica
from node.model.stage_work import LossAndAnswer, StageWork
from node.model.transfer import Pending
from node.pipeline.deliveries import Deliveries
from node.pipeline.gate import Gate, Window
from node.pipeline.gradient_screen import StageDiagnostics
from node.pipeline.incoming import IncomingTensors
from node.pipeline.loss_screen import ODD_PAUSE, LossScreen, OddWork
from node.pipeline.microbatch import (
    DrawnMicrobatch,
    Microbatch,
    ReceivedMicrobatch,
    ReturnedMicrobatch,
    StageParts,
)
from node.pipeline.stage_client import StageClient
from node.pipeline.step_places import OWN, Sender
from node.watch.trace import Track
from protocol.codecs.codec import Encoded
from protocol.errors import NonFinite, OddLoss, OutOfMemory, Refused, Unrepeatable
from protocol.ground import MOST_LOSS, PeerId
from protocol.messages.training import Backlog, Forward, GetBacklog, Gradient, Return
from protocol.rpc.rpc import Answer, Request, Rpc

SENDING_SECONDS = 60.0  # after its last microbatch a peer counts as one of those that send
AGAIN_SECONDS = (
    1.0  # before an own microbatch is tried again that memory had no room for, or that came out wrong
)


class Pipeline:
    """Takes microbatches through this stage and onward, and their gradients back."""

    def __init__(self, context: Context, replica: Replica, work: StageWork, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        inner, in_flight = context.manifest.inner, replica.passes.execution.in_flight
        if context.is_last:  # forward and backward passes are one piece of work: nothing is between them
            self._gate = Gate(inner.microbatches, 0, inner.microbatches)
        else:
            self._gate = Gate(inner.microbatches, inner.staleness, in_flight)
        incoming = IncomingTensors(context.manifest, replica.stage, work.transfer)
        self._parts = StageParts(context, work, incoming, self._gate, itertools.count())
        self._onward = StageClient(context, rng)
        self._window = Window(inner.microbatches, in_flight)
        self._deliveries = Deliveries(context.supervisor, REMEMBERED_BATCHES * inner.microbatches)
        self._diagnostics = StageDiagnostics(context, replica)
        self._loss_screen = LossScreen(context.manifest.model.vocab_size)
        self._odd_work = OddWork()
        self._goes_by_run = context.manifest.inner.clock == "run"
        self._sent_at: dict[PeerId, float] = {}  # the loop's time, of those that sent microbatches lately
        self._beginnings = set[int]()  # of the lineages of the stage before, whose losses are known
        self._losses: list[float] = []  # of this step
        self._own: dict[str, Microbatch] = {}  # in a ring, those drawn here that are under way
        self.serving = True  # peers, too
        self.doubt = asyncio.Event()  # something computed here was NaN: the weights may be
        self.fed = -math.inf  # when one of a sender that is not doubted counted last, by the loop's clock

    # --- one inner step -----------------------------------------------------------------------

    async def batch_complete(self) -> None:
        await self._gate.complete()

    def next_step(self) -> None:
        """Admit what waited, as the weights have changed. Keeps the mean loss of the finished step."""
        if self._losses:
            counters = self._context.counters
            counters.loss = loss = sum(self._losses) / len(self._losses)
            counters.losses.note(self._context.view.elapsed(), loss)
        self._losses.clear()
        self._diagnostics.note_step()
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
        """True if a microbatch runs or waits here."""
        return self._gate.is_busy

    def prepare_to_leave(self) -> None:
        """Finish what others can still take; do not wait for peers that may never come."""
        self._onward.prepare_to_leave()

    @property
    def gradients_in(self) -> int:
        """The number of microbatches of this step that have their gradients in."""
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

    def serve(self, rpc: Rpc) -> None:
        """Answer the stages before this one, and in a ring the last one, from now on."""
        rpc.handle(Forward.answered_by(self.on_forward), GetBacklog.answered_by(self.on_get_backlog))
        if self._context.manifest.is_ring and self._context.stage == 0:
            rpc.handle(Return.answered_by(self.on_return))

    async def on_forward(self, request: Request[Forward]) -> Answer[Gradient]:
        """Train what is delivered; a repeated delivery joins the first one, or gets its answer again."""
        self._require_served(request.message.stage)
        microbatch = ReceivedMicrobatch(self._parts, request)
        return await self._deliveries.get_or_start(microbatch, request.status, self._train_received)

    async def on_get_backlog(self, request: Request[GetBacklog]) -> Answer[Backlog]:
        self._require_served(request.message.stage)
        return Answer(Backlog(seconds=round(self._gate.backlog * self._seconds_each(), 6)))

    def _require_served(self, stage: int) -> None:
        if not self.serving or stage != self._context.stage or stage == 0:
            raise Refused("not-serving", f"this node serves stage {self._context.stage}")

    async def _train_received(self, microbatch: ReceivedMicrobatch) -> Answer[Gradient]:
        """Train a microbatch as `train` does; what the sender has had done is counted for receipts."""
        context = self._context
        answer = await self.train(microbatch)
        context.contributions.note_given(microbatch.sender, context.manifest.tokens_per_microbatch)
        if microbatch.is_of_first_stage:
            context.contributions.note_tokens(microbatch.sender, context.manifest.tokens_per_microbatch)
        return answer

    async def on_return(self, request: Request[Return]) -> Answer[Gradient]:
        """Compute a ring's head and loss and their gradient, for what this peer has drawn, or another one has.

        It waits for nobody, as the microbatch that it is part of has its place in the step already.
        """
        microbatch = ReturnedMicrobatch(self._parts, request)
        return await self._deliveries.get_or_start(microbatch, request.status, self._come_back)

    async def draw(self, name: str, batch: Batch) -> Answer[Gradient]:
        """Train an own microbatch, which nobody else would take; again when this machine failed at it."""
        while True:
            try:
                return await self.train(DrawnMicrobatch(self._parts, name, batch, self._replica.step))
            except (OutOfMemory, Unrepeatable):
                await asyncio.sleep(AGAIN_SECONDS)

    async def train(self, microbatch: Microbatch) -> Answer[Gradient]:
        """Carry one microbatch forward and backward through this stage and all later ones.

        Raises `Refused`: "busy" when the queue is full, "non-finite" and "bad-shape" for its content, here or at a
        later stage. Whatever is raised, its place in the step is free again unless its gradient is in.
        """
        context = self._context
        microbatch.mark_queued()
        await self._require_afforded(microbatch.sender)
        with context.trace.waiting(Track.GATE, "wait for a place in a batch", microbatch=microbatch.name):
            await self._gate.enter(microbatch.place, self._sender_of(microbatch))
        microbatch.mark_computing()
        began = asyncio.get_running_loop().time()
        try:
            if context.is_last:
                is_ending = context.view.most_have_finished(context.stage - 1, context.transport.now())
                self._look_at_lineage(microbatch.sender)
                microbatch.most_loss = self._loss_screen.most(microbatch.sender, is_ending)
                result = await context.compute.run(Priority.FORWARD, microbatch.last_stage)
            else:
                result = await self._train_through(microbatch)
        except BaseException as error:
            self._gate.give_up(microbatch.place)
            if isinstance(error, OddLoss):
                self._screen_loss(microbatch, error.loss)
                if microbatch.sender is not None:
                    now = asyncio.get_running_loop().time()
                    self._odd_work.charge(microbatch.sender, self._seconds_each(), now)
            self._report(error)
            raise
        finally:
            self._own.pop(microbatch.name, None)
        return await self._answer(microbatch, result, began)

    async def _require_afforded(self, sender: PeerId | None) -> None:
        """Refuse a sender as "busy" if too much of what it sent lately was computed and did not count.

        The refusal takes a while: a flood is no faster than its places are free again. Behind stage 1 nobody is
        refused so: a stage in the middle carries others' microbatches, and whoever sent it nonsense would stop it.
        """
        if self._context.stage != 1:
            return
        now = asyncio.get_running_loop().time()
        if sender is not None and not self._odd_work.affords(sender, self._seconds_each(), now):
            await asyncio.sleep(ODD_PAUSE)
            raise Refused("busy", "too much of what this peer sent had losses far above those of others")

    def _sender_of(self, microbatch: Microbatch) -> Sender:
        peer = microbatch.sender
        return OWN if peer is None else Sender(peer, self._context.view.group_of(peer))

    async def _answer(
        self, microbatch: Microbatch, result: Pending[LossAndAnswer], began: float
    ) -> Answer[Gradient]:
        """Answer for a microbatch whose gradient is in: it counts, also when what its sender gets cannot be sent."""
        context = self._context
        try:
            loss, answer = await result.result()
        except Refused as error:
            self._report(error)
            raise
        else:
            self._losses.append(loss)
            if self._goes_by_run and microbatch.sender is not None:
                self._replica.clock.note(microbatch.step, self._replica.step)
            if context.is_last:
                self._screen_loss(microbatch, loss)
            context.counters.tokens += context.manifest.tokens_per_microbatch
            context.throughput.tokens += context.manifest.tokens_per_microbatch
            if microbatch.sender is None or not self._loss_screen.is_doubted(microbatch.sender):
                self.fed = asyncio.get_running_loop().time()
        finally:
            context.counters.received += 1
            context.throughput.microbatches += 1
            self._gate.done(microbatch.place)
        return self._reply(loss, answer, began)

    def _reply(self, loss: float, answer: list[Encoded], began: float) -> Answer[Gradient]:
        seconds = round(asyncio.get_running_loop().time() - began, 6)
        told = min(max(loss, 0.0), MOST_LOSS)  # of a model that diverges it may be more, by rounding less
        return Answer(
            Gradient(loss=told, queue=self._gate.waiting, step=self._replica.step, seconds=seconds), answer
        )

    async def _train_through(self, microbatch: Microbatch) -> Pending[LossAndAnswer]:
        context, clock, name = self._context, asyncio.get_running_loop().time, microbatch.name
        if context.manifest.is_ring and context.stage == 0:
            self._own[name] = microbatch
        activations = await context.compute.run(Priority.FORWARD, microbatch.forward)
        parcel = await activations.result()
        sent = clock()
        with context.trace.waiting(Track.GRADIENT, "wait for a gradient", microbatch=name):
            loss, gradient = await self._onward.send(microbatch, parcel)
        self._adapt(clock() - sent)
        with context.trace.waiting(Track.GATE, "wait for its step", microbatch=name):
            microbatch.mark_queued()
            await self._gate.backward(microbatch.place)
        microbatch.mark_computing()
        return await context.compute.run(Priority.BACKWARD, microbatch.backward, loss, gradient)

    async def _come_back(self, microbatch: ReturnedMicrobatch) -> Answer[Gradient]:
        """Run the head. The first delivery of an own microbatch teaches it; a resent one came along another way."""
        context, began = self._context, asyncio.get_running_loop().time()
        drawn = self._own.get(microbatch.origin.draw) if microbatch.origin.peer == context.me else None
        if not self.serving and drawn is None:
            raise Refused("not-serving", f"this node no longer serves stage {context.stage}")
        if drawn is not None and not drawn.has_taught_head:
            drawn.has_taught_head = microbatch.learns = True
        microbatch.mark_computing()
        try:
            result = await context.compute.run(Priority.BACKWARD, microbatch.head)
        except BaseException as error:
            if drawn is not None and microbatch.learns:
                drawn.has_taught_head = False
            self._report(error)
            raise
        return self._reply(*await result.result(), began)

    def _look_at_lineage(self, sender: PeerId | None) -> None:
        """Forget the losses known so far once all that send here have another lineage: their stage was begun anew.

        They are those of other weights, and whoever began would be doubted for as long as they are remembered. A peer
        that sends nothing does not count: by its record alone it would keep them remembered.
        """
        context, now = self._context, asyncio.get_running_loop().time()
        if sender is not None:
            self._sent_at[sender] = now
        sending = self._sent_at = {p: at for p, at in self._sent_at.items() if now - at <= SENDING_SECONDS}
        before = context.view.members(context.stage - 1, context.transport.now())
        said = {m.peer: m.announcement.beginning for m in before if m.announcement.state == "serving"}
        beginnings = {said[peer] for peer in sending.keys() & said.keys()}
        if len(beginnings) == 1 and beginnings != self._beginnings:
            if self._beginnings:
                self._loss_screen = LossScreen(context.manifest.model.vocab_size)
            self._beginnings = beginnings

    def _screen_loss(self, microbatch: Microbatch, loss: float) -> None:
        sender = microbatch.sender
        if sender is not None and self._loss_screen.note(sender, loss):
            self._context.events.warn(
                f"What peer {self._context.view.called(sender)} sends has losses far above those of others: it "
                "does not count until it is like theirs again. If that peer is yours, look at its log.",
                "odd-losses",
                peer=sender,
                loss=round(loss, 4),
            )

    def _report(self, error: BaseException) -> None:
        if isinstance(error, Unrepeatable):
            self._diagnostics.note_unrepeatable(error)
        if isinstance(error, NonFinite):
            self._diagnostics.note(error)
            if not error.overflows:
                self.doubt.set()

    def _adapt(self, seconds: float) -> None:
        """Keep as many microbatches in flight as hide the `seconds` after which a gradient came back."""
        fitting = self._replica.passes.execution.in_flight  # fewer than at the start where memory ran out
        self._gate.allow(min(fitting, self._window.in_flight(seconds, self._seconds_each())))

    def _seconds_each(self) -> float:
        """Seconds that this device computes for a microbatch, the mean so far."""
        context = self._context
        return context.compute.busy.seconds() / (context.throughput.microbatches + 1)
