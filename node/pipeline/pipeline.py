"""The way of a microbatch through this stage: admission, forward, onward, backward, answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from node.context import Context
from node.model.compute import Priority
from node.model.footprint import REMEMBERED_BATCHES
from node.model.replica import Replica
from node.model.stage_work import Load, StageWork
from node.pipeline.gate import Gate
from node.pipeline.onward import Home, Onward
from node.pipeline.window import Window
from node.watch.trace import Track
from protocol.codec import Encoded
from protocol.errors import OutOfMemory, Refused
from protocol.messages import Forward, Gradient, Return
from protocol.rpc import Answer, Request
from protocol.transport.base import PeerId

NO_ROOM_SECONDS = 1.0  # before an own microbatch that memory had no room for is tried again


class Pipeline:
    """Mutable state: answers in progress and recent, the losses of this step, whether peers are served, and in a ring
    the own microbatches that are under way, with whether the head has learned from them.
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
        self._onward = Onward(context, rng)
        self._window = Window(inner.microbatches, in_flight)
        self._answers: dict[str, asyncio.Task[Answer]] = {}
        self._losses: list[float] = []
        self._own: dict[str, bool] = {}
        self.serving = True

    # --- one inner step -----------------------------------------------------------------------

    async def batch_complete(self) -> None:
        """Wait until the gradients of exactly one batch are in."""
        await self._gate.complete()

    def next_step(self) -> None:
        """The weights have changed: admit what waited. Keeps the mean loss of the finished step."""
        if self._losses:
            self._context.counters.loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
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

    async def drain(self) -> None:
        """Admit nothing more from peers and wait for what is running here."""
        self.serving = False
        await self._gate.idle()

    async def close(self) -> None:
        """Give up everything that waits or runs; callers get an error."""
        self.serving = False
        self._gate.close()
        for task in list(self._answers.values()):
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    # --- training -----------------------------------------------------------------------------

    async def on_forward(self, request: Request) -> Answer:
        """A repeated delivery joins the first one, or gets its answer again."""
        message: Forward = request.message
        if not self.serving or message.stage != self._context.stage or message.stage == 0:
            raise Refused("not-serving", f"this node serves stage {self._context.stage}")
        home = Home(PeerId(message.home), message.draw) if message.home else None
        name = f"{request.peer}/{message.microbatch}"
        return await self._once(name, lambda: self.train(name, lambda: self._work.decoded(request), home))

    async def on_return(self, request: Request) -> Answer:
        """In a ring: the head, the loss and their gradient of what this peer has drawn, or another one has.

        It waits for nobody, as the microbatch that it is part of has its place in the step already.
        """
        message: Return = request.message
        return await self._once(
            f"{request.peer}/{message.microbatch}/back", lambda: self._come_back(message, request)
        )

    async def _once(self, name: str, answer: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        task = self._answers.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(answer())
            self._remember(name, task)
        return await asyncio.shield(task)

    async def draw(self, microbatch: str, load: Load) -> Answer:
        """An own microbatch, which nobody else would take: as `train`, again when the memory had no room for it."""
        while True:
            try:
                return await self.train(microbatch, load)
            except OutOfMemory:
                await asyncio.sleep(NO_ROOM_SECONDS)

    async def train(self, microbatch: str, load: Load, home: Home | None = None) -> Answer:
        """Carry one microbatch forward and backward through this stage and all later ones.

        Raises `Refused` "busy" when the queue is full. Whatever is raised, the microbatch has left no trace
        in the gradients and its place in the step is free again.
        """
        context = self._context
        with context.trace.waiting(Track.GATE, "wait for a place in a batch", microbatch=microbatch):
            await self._gate.enter(microbatch)
        began = asyncio.get_running_loop().time()
        try:
            if context.is_last:
                landing = await context.compute.run(Priority.FORWARD, self._work.last_stage, load)
                loss, answer = await landing.landed()
            else:
                loss, answer = await self._train_through(microbatch, load, home)
        except BaseException:
            self._gate.give_up(microbatch)
            raise
        finally:
            self._own.pop(microbatch, None)
        self._gate.done(microbatch)
        self._losses.append(loss)
        context.counters.received += 1
        context.counters.tokens += context.manifest.tokens_per_microbatch
        seconds = asyncio.get_running_loop().time() - began
        reply = Gradient(
            loss=loss, queue=self._gate.waiting, step=self._replica.step, seconds=round(seconds, 6)
        )
        return Answer(reply, answer)

    async def _train_through(
        self, microbatch: str, load: Load, home: Home | None
    ) -> tuple[float, list[Encoded]]:
        context = self._context
        if context.manifest.is_ring and context.stage == 0:
            home = Home(context.me, microbatch)
            self._own[microbatch] = False
        leaf, outputs, activations = await context.compute.run(Priority.FORWARD, self._work.forward, load)
        parcel = await activations.landed()
        sent = asyncio.get_running_loop().time()
        with context.trace.waiting(Track.GRADIENT, "wait for a gradient", microbatch=microbatch):
            loss, gradient = await self._onward.send(microbatch, parcel, home)
        self._adapt(asyncio.get_running_loop().time() - sent)
        with context.trace.waiting(Track.GATE, "wait for its step", microbatch=microbatch):
            await self._gate.backward(microbatch)
        by_inputs = await context.compute.run(Priority.BACKWARD, self._work.backward, leaf, outputs, gradient)
        return loss, await by_inputs.landed()

    async def _come_back(self, message: Return, request: Request) -> Answer:
        """The first delivery of an own microbatch teaches the head; a resent one came along another way."""
        context, began = self._context, asyncio.get_running_loop().time()
        is_own = message.home == context.me and message.draw in self._own
        if not (self.serving or is_own):
            raise Refused("not-serving", f"this node serves stage {context.stage} no more")
        learns = is_own and not self._own[message.draw]
        if learns:
            self._own[message.draw] = True
        try:
            landing = await context.compute.run(
                Priority.BACKWARD, self._work.head, lambda: self._work.decoded(request, is_back=True), learns
            )
            loss, answer = await landing.landed()
        except BaseException:
            if learns and message.draw in self._own:
                self._own[message.draw] = False
            raise
        seconds = round(asyncio.get_running_loop().time() - began, 6)
        reply = Gradient(loss=loss, queue=self._gate.waiting, step=self._replica.step, seconds=seconds)
        return Answer(reply, answer)

    def _adapt(self, seconds: float) -> None:
        """A gradient came back after `seconds`: as many microbatches in flight as hide such a time."""
        context = self._context
        computing = context.compute.busy.seconds() / (context.counters.received + 1)
        fitting = self._replica.passes.execution.in_flight  # fewer than at the start where memory ran out
        self._gate.allow(min(fitting, self._window.in_flight(seconds, computing)))

    def _remember(self, name: str, task: asyncio.Task[Answer]) -> None:
        """Keep the last answers for repeated deliveries: a few batches of them, never those that failed."""
        self._answers[name] = task
        keep = REMEMBERED_BATCHES * self._context.manifest.inner.microbatches
        for old in [n for n, t in self._answers.items() if t.done()][: max(0, len(self._answers) - keep)]:
            del self._answers[old]

        def forget_failure(done: asyncio.Task[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._answers.pop(name, None)

        task.add_done_callback(forget_failure)
