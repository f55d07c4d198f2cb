"""The way of a microbatch through this stage: admission, forward, onward to a random peer, backward, answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from node.admission import Admission, Decision
from node.compute import Priority
from node.context import Context
from node.deadlines import AdaptiveDeadline
from node.replica import Replica
from node.routing import Router
from protocol.codec import Encoded, encode, require_finite
from protocol.errors import (
    CodecError,
    DeadlineExceeded,
    NolocoError,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.messages import Evaluate, Evaluated, Forward, Gradient
from protocol.rpc import Answer, Request, Traffic
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

QUEUE_BATCHES = 2  # microbatches that may wait here, in batches of an inner step
RETRY_SECONDS = 0.05  # before asking again peers that were all busy
PAUSE_SECONDS = 0.5  # between looks for a live peer of the next stage
LEAST_DEADLINE = 5.0  # a peer may be in its outer step or start up; below this a deadline only causes resends
EVALUATION_DEADLINE = 60.0

Load = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # decodes (inputs, labels) on the compute thread


class Pipeline:
    """Mutable state: the admission, waiting microbatches, answers in progress and recent, losses of a step."""

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        inner = context.manifest.inner
        self.admission = Admission(inner.microbatches, QUEUE_BATCHES * inner.microbatches)
        self._router = Router(rng)
        self._deadline = AdaptiveDeadline(context.manifest.limits.microbatch_deadline, LEAST_DEADLINE)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._answers: dict[str, asyncio.Task[Answer]] = {}
        self._losses: list[float] = []
        self._complete = asyncio.Event()
        self._idle = asyncio.Event()
        self.serving = True
        self._holding = False
        self._told_no_peer = False
        self._leaving = False

    # --- one inner step -----------------------------------------------------------------------

    async def batch_complete(self) -> None:
        """Wait until the gradients of exactly one batch are in."""
        await self._complete.wait()

    def next_step(self) -> None:
        """The weights have changed: admit what waited. Keeps the mean loss of the finished step."""
        if self._losses:
            self._context.counters.loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        self._complete.clear()
        self._holding = False
        self._wake(self.admission.next_step())

    def hold(self) -> None:
        """Send waiting microbatches elsewhere and refuse new ones until the next step.

        A replica that waits for its partner must not keep the work that the partner needs to get there.
        """
        self._holding = True
        for turn in list(self._turns.values()):
            if not turn.done():
                turn.set_exception(Refused("busy", "this replica is at the end of its round"))

    def prepare_to_leave(self) -> None:
        """Finish what others can still take; do not wait for peers that may never come."""
        self._leaving = True

    async def drain(self) -> None:
        """Admit nothing more from peers and wait for what is running here."""
        self.serving = False
        self._idle.clear()
        if self.admission.running:
            await self._idle.wait()

    # --- training -----------------------------------------------------------------------------

    async def on_forward(self, request: Request) -> Answer:
        """A repeated delivery joins the first one, or gets its answer again."""
        message: Forward = request.message
        if not self.serving or message.stage != self._context.stage or message.stage == 0:
            raise Refused("not-serving", f"this node serves stage {self._context.stage}")
        name = f"{request.peer}/{message.microbatch}"
        task = self._answers.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self.train(name, lambda: self._decoded(request)))
            self._remember(name, task)
        return await asyncio.shield(task)

    async def train(self, microbatch: str, load: Load) -> Answer:
        """Carry one microbatch forward and backward through this stage and all later ones.

        Raises `Refused` "busy" when the queue is full. Whatever is raised, the microbatch has left no trace
        in the gradients and its place in the step is free again.
        """
        context = self._context
        await self._admitted(microbatch)
        began = asyncio.get_running_loop().time()
        try:
            if context.is_last:
                loss, answer = await context.compute.run(Priority.FORWARD, self._work_last_stage, load)
            else:
                loss, answer = await self._train_through(microbatch, load)
        except BaseException:
            self._wake(self.admission.release(microbatch))
            self._tell_when_idle()
            raise
        self.admission.done(microbatch)
        self._tell_when_idle()
        self._losses.append(loss)
        context.counters.received += 1
        context.counters.tokens += context.manifest.tokens_per_microbatch
        if self.admission.complete:
            self._complete.set()
        seconds = asyncio.get_running_loop().time() - began
        reply = Gradient(
            loss=loss, queue=self.admission.waiting, step=self._replica.step, seconds=round(seconds, 6)
        )
        return Answer(reply, answer)

    async def _train_through(self, microbatch: str, load: Load) -> tuple[float, list[Encoded]]:
        context = self._context
        leaf, outputs, parcel = await context.compute.run(Priority.FORWARD, self._work_forward, load)
        loss, gradient = await self._send_onward(microbatch, parcel)
        answer = await context.compute.run(Priority.BACKWARD, self._work_backward, leaf, outputs, gradient)
        return loss, answer

    async def _send_onward(self, microbatch: str, parcel: list[Encoded]) -> tuple[float, torch.Tensor]:
        """To random peers of the next stage until one answers; returns its loss and the gradient.

        Each failure costs one resend to another peer. With no live peer this waits for one to appear.
        """
        context, tried = self._context, set[PeerId]()
        while True:
            peers = context.view.serving(context.stage + 1, context.transport.now())
            peer = self._router.choose(peers, exclude=tried)
            if peer is None:
                await self._wait_for_peers(bool(peers))
                tried.clear()
                continue
            try:
                answer = await self._ask(peer, microbatch, parcel)
            except Refused as refusal:
                logger.debug("Peer %s refused a microbatch: %s", peer[-8:], refusal)
                tried.add(peer)
            except (PeerUnreachable, DeadlineExceeded, WireError) as failure:
                self._note_failure(peer, failure)
                tried.add(peer)
            except TransportDown as problem:
                if self._leaving:
                    raise
                logger.debug("Waiting for the network: %s", problem)
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                context.view.trust(peer)
                self._told_no_peer = False
                return answer

    async def _ask(self, peer: PeerId, microbatch: str, parcel: list[Encoded]) -> tuple[float, torch.Tensor]:
        context = self._context
        stages_behind = context.manifest.stages - 1 - context.stage
        began = asyncio.get_running_loop().time()
        reply, tensors = await context.rpc.call(
            peer,
            Traffic.PIPELINE,
            Forward(microbatch=microbatch[-64:], stage=context.stage + 1),
            Gradient,
            parcel,
            deadline=self._deadline.seconds() * stages_behind,
        )
        try:
            if len(tensors) != 1 or tuple(tensors[0].shape) != parcel[0].shape:
                raise CodecError("the gradient does not have the shape of the activations")
            require_finite(tensors[0])
        except CodecError:
            context.rpc.strike(peer)
            raise
        seconds = asyncio.get_running_loop().time() - began
        self._deadline.note(seconds / stages_behind)
        self._router.note(peer, reply.seconds, reply.queue)
        context.counters.sent[peer] = context.counters.sent.get(peer, 0) + 1
        return reply.loss, tensors[0]

    def _note_failure(self, peer: PeerId, failure: NolocoError) -> None:
        context = self._context
        if isinstance(failure, DeadlineExceeded):
            self._deadline.note_missed()
        context.view.suspect(peer, context.transport.now())
        self._router.forget(peer)
        context.counters.resends += 1
        context.events.warn(
            f"Peer {peer[-8:]} of stage {context.stage + 1} did not answer ({failure}); "
            "its microbatch goes to another one.",
            "resend",
            peer=peer,
            reason=type(failure).__name__,
        )

    async def _wait_for_peers(self, some_are_busy: bool) -> None:
        if some_are_busy:
            await asyncio.sleep(RETRY_SECONDS)
            return
        if self._leaving:
            raise TransportDown("this node is leaving and nobody can take its microbatches")
        if not self._told_no_peer:
            self._told_no_peer = True
            stage = self._context.stage + 1
            self._context.events.warn(
                f"No live peer serves stage {stage} at present; waiting for one.", "no-peer", stage=stage
            )
        await asyncio.sleep(PAUSE_SECONDS)

    # --- evaluation ---------------------------------------------------------------------------

    async def on_evaluate(self, request: Request) -> Answer:
        """Loss of the slow weights on a microbatch, along the route that the caller chose."""
        context, message = self._context, request.message
        if (
            message.stage != context.stage
            or len(message.route) != context.manifest.stages - 1 - context.stage
        ):
            raise Refused("not-serving", "the route does not fit this stage")
        if context.is_last:
            loss_sum, tokens = await context.compute.run(
                Priority.SERVE, self._work_evaluate_last, lambda: self._decoded(request)
            )
            return Answer(Evaluated(loss_sum=loss_sum, tokens=tokens))
        parcel = await context.compute.run(
            Priority.SERVE, self._work_evaluate, lambda: self._decoded(request)
        )
        onward = Evaluate(stage=message.stage + 1, route=message.route[1:])
        try:
            evaluated, _ = await context.rpc.call(
                PeerId(message.route[0]),
                Traffic.PIPELINE,
                onward,
                Evaluated,
                parcel,
                deadline=EVALUATION_DEADLINE,
            )
        except WireError as failure:  # of the next stage, not of the one who asks
            raise Refused("failed", f"stage {onward.stage} answered nonsense") from failure
        return Answer(evaluated)

    # --- on the compute thread ----------------------------------------------------------------

    def _decoded(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of a request, checked. Raises `Refused` for what does not fit this stage."""
        try:
            inputs, labels = request.tensors()
        except ValueError:
            raise Refused("bad-shape", "two tensors are expected: inputs and labels") from None
        model, data = self._context.manifest.model, self._context.manifest.data
        shape = (labels.shape[0] if labels.dim() else 0, data.sequence_tokens)
        expected = shape if self._replica.stage.is_first else (*shape, model.hidden_size)
        if not shape[0] or tuple(labels.shape) != shape or tuple(inputs.shape) != expected:
            raise Refused("bad-shape", f"expected inputs of shape {expected}")
        for tokens in (labels, inputs) if self._replica.stage.is_first else (labels,):
            if tokens.is_floating_point() or int(tokens.min()) < 0 or int(tokens.max()) >= model.vocab_size:
                raise Refused("bad-shape", "tokens are outside the vocabulary")
        if not self._replica.stage.is_first:
            inputs = inputs.float()
            if not bool(torch.isfinite(inputs).all()):
                raise Refused("non-finite", "the activations hold NaN or infinity")
        return inputs, labels.long()

    def _work_forward(self, load: Load) -> tuple[torch.Tensor, torch.Tensor, list[Encoded]]:
        inputs, labels = load()
        leaf, outputs = self._replica.forward(inputs)
        return leaf, outputs, self._parcel(outputs, labels, self._context.manifest.wire.activations)

    def _work_backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> list[Encoded]:
        by_inputs = self._replica.backward(leaf, outputs, gradient)
        return self._answer_tensors(by_inputs)

    def _work_last_stage(self, load: Load) -> tuple[float, list[Encoded]]:
        loss, by_inputs = self._replica.loss_and_backward(*load())
        return loss, self._answer_tensors(by_inputs)

    def _work_evaluate(self, load: Load) -> list[Encoded]:
        inputs, labels = load()
        return self._parcel(self._replica.evaluate(inputs), labels, "fp32")

    def _work_evaluate_last(self, load: Load) -> tuple[float, int]:
        inputs, labels = load()
        logits = self._replica.evaluate(inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum").item(), labels.numel()

    def _parcel(self, outputs: torch.Tensor, labels: torch.Tensor, codec: str) -> list[Encoded]:
        return [encode(outputs.detach().cpu(), codec), encode(labels.to(torch.int32), "int32")]

    def _answer_tensors(self, by_inputs: torch.Tensor | None) -> list[Encoded]:
        if by_inputs is None:
            return []
        return [encode(by_inputs.cpu(), self._context.manifest.wire.gradients)]

    # --- admission ----------------------------------------------------------------------------

    async def _admitted(self, microbatch: str) -> None:
        if self._holding:
            raise Refused("busy", "this replica is at the end of its round")
        decision = self.admission.request(microbatch)
        if decision is Decision.FULL:
            raise Refused("busy", f"{self.admission.waiting} microbatches wait here already")
        if decision is Decision.ADMITTED:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[microbatch] = turn
        try:
            await turn
        except BaseException:
            self._wake(self.admission.release(microbatch))
            raise
        finally:
            self._turns.pop(microbatch, None)

    def _wake(self, admitted: Sequence[str]) -> None:
        for microbatch in admitted:
            turn = self._turns.get(microbatch)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _tell_when_idle(self) -> None:
        if not self.admission.running:
            self._idle.set()

    def _remember(self, name: str, task: asyncio.Task[Answer]) -> None:
        """Keep the last answers for repeated deliveries: a few batches of them, never those that failed."""
        self._answers[name] = task
        keep = (QUEUE_BATCHES + 2) * self.admission.batch
        for old in [n for n, t in self._answers.items() if t.done()][: max(0, len(self._answers) - keep)]:
            del self._answers[old]

        def forget_failure(done: asyncio.Task[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._answers.pop(name, None)

        task.add_done_callback(forget_failure)

    async def close(self) -> None:
        """Give up everything that waits or runs; callers get an error."""
        self.serving = False
        for turn in list(self._turns.values()):
            if not turn.done():
                turn.set_exception(TransportDown("this node is leaving"))
        for task in list(self._answers.values()):
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)
