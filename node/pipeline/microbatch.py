"""A microbatch at this stage: one object from where it is drawn or received until its answer is sent.

It counts from the moment at which the work begins that adds to the stage's gradients. Before, it can be cancelled
without a trace; after, it is finished whoever waits. The compute thread decides the one, the loop the other.
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import itertools
import math
import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from node.context import Context
from node.data.batches import Batch
from node.model.stage_work import LossAndAnswer, StageWork
from node.model.transfer import Pending
from node.pipeline.gate import Gate
from node.pipeline.incoming import IncomingTensors
from protocol.codecs.codec import Encoded
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages import Progress
from protocol.messages.training import Forward, Return
from protocol.rpc.rpc import Request

State: TypeAlias = Literal["queued", "computing", "onward"]


@dataclass(frozen=True)
class Origin:
    """The peer that drew a microbatch's sequences, and the name that it gave them."""

    peer: PeerId
    draw: str


@dataclass(frozen=True)
class StageParts:
    """The parts of this stage that microbatches meet: its context, passes and gate, and a number for each of them."""

    context: Context
    work: StageWork
    incoming: IncomingTensors
    gate: Gate
    numbers: itertools.count[int]


class Microbatch(abc.ABC):
    """Sequences on their way through this stage: what they hold, how far they are, and whether they count.

    `read`, and what returns a `Pending`, is called by the compute thread, the rest by the loop.
    """

    def __init__(self, parts: StageParts, name: str, origin: Origin | None = None) -> None:
        """`name` is that of all its deliveries; `origin` is known in a ring."""
        self.name = name
        self.origin = origin
        self.sender: PeerId | None = None  # None where this node has drawn it
        self.step = 0  # of the replica that drew it, where the run's clock goes by it
        self.most_loss = math.inf  # with which it counts, where the model ends
        # given up and delivered again, it must not take its own place
        self.place = f"{name}#{next(parts.numbers)}"
        self.has_taught_head = False  # in a ring, at the first stage
        self._parts = parts
        self._graph: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # leaf and outputs, until the backward pass
        )
        self._state: State = "queued"
        self._ahead = 0  # where the next stage has it
        self._finished_then = parts.context.compute.finished
        self._done = 0
        self._done_onward = 0
        self._since = parts.context.compute.clock()
        self._decided = threading.Lock()

    def __repr__(self) -> str:
        stage, seconds = self._parts.context.stage, self._parts.context.compute.clock() - self._since
        doing = {
            "queued": "waiting for its turn",
            "computing": "computing",
            "onward": "waiting for its gradient",
        }
        return f"<Microbatch {self.name} of stage {stage}, {doing[self._state]}, {seconds:.1f} s>"

    @abc.abstractmethod
    def read(self) -> Batch:
        """Inputs and labels. Raises `Refused` for what does not fit this stage."""

    @property
    def onward_name(self) -> str:
        """The name of its activations at the next stage: others under the same name would get the answer to these."""
        return hashlib.blake2b(self.place.encode(), digest_size=24).hexdigest()

    # --- passes -------------------------------------------------------------------------------

    def forward(self) -> Pending[list[Encoded]]:
        """The activations and labels for the next stage."""
        leaf, outputs, activations = self._parts.work.forward(*self.read())
        self._graph = leaf, outputs
        return activations

    def backward(self, loss: float, gradient: torch.Tensor) -> Pending[LossAndAnswer]:
        """The answer for the stage before; needs `forward` before it. Raises `Refused` "given-up" when cancelled."""
        self._commit()
        assert self._graph is not None
        (leaf, outputs), self._graph = self._graph, None
        return self._parts.work.backward(leaf, outputs, gradient, loss)

    def last_stage(self) -> Pending[LossAndAnswer]:
        """Both passes, where the model ends.

        Raises `Refused` "given-up" when cancelled, `NonFinite` and `OddLoss` for its loss.
        """
        self._commit()
        return self._parts.work.last_stage(*self.read(), self.most_loss)

    # --- whether it counts --------------------------------------------------------------------

    def cancel(self) -> bool:
        """Cancel it, as nobody waits for it. True if it will not count; False once it does."""
        return self._decided.acquire(blocking=False)

    def _commit(self) -> None:
        if not self._decided.acquire(blocking=False):
            raise Refused("given-up", "nobody waits for this microbatch any more")

    # --- how far it is ------------------------------------------------------------------------

    def mark_queued(self) -> None:
        """Note that it waits for its turn at the gate."""
        self._enter("queued")

    def mark_computing(self) -> None:
        """Note that the device has it, or that it is among the next."""
        self._enter("computing")

    def mark_onward(self) -> None:
        """Note that a later stage has it from now on, or another peer of it than before."""
        self._enter("onward")
        self._done_onward = 0

    def note_onward(self, progress: Progress) -> None:
        """Note how far the later stage says that it is there."""
        self._ahead = progress.ahead
        self._done += progress.done > self._done_onward
        self._done_onward = progress.done

    def progress(self) -> Progress:
        """The progress to tell its sender. Whatever the device finishes while it is here brings its turn closer."""
        ahead = self._parts.gate.before(self.place) if self._state == "queued" else self._ahead
        return Progress(state=self._state, ahead=ahead, done=self._done + self._finished_since())

    def _enter(self, state: State) -> None:
        compute = self._parts.context.compute
        self._done += 1 + self._finished_since()
        self._state, self._ahead = state, 0
        self._finished_then, self._since = compute.finished, compute.clock()

    def _finished_since(self) -> int:
        """Pieces of training work that the device has finished since it came to be in this state."""
        return 0 if self._state == "onward" else self._parts.context.compute.finished - self._finished_then


class DrawnMicrobatch(Microbatch):
    """One that this node has drawn from its own data, at the first stage."""

    def __init__(self, parts: StageParts, name: str, batch: Batch, step: int) -> None:
        is_ring = parts.context.manifest.is_ring
        super().__init__(parts, name, Origin(parts.context.me, name) if is_ring else None)
        self.step = step
        self._batch = batch

    def read(self) -> Batch:
        return self._batch


class ReceivedMicrobatch(Microbatch):
    """One that a peer of the stage before has sent."""

    def __init__(self, parts: StageParts, request: Request[Forward]) -> None:
        message = request.message
        origin = Origin(PeerId(message.home), message.draw) if message.home else None
        super().__init__(parts, f"{request.peer}/{message.microbatch}", origin)
        self.sender: PeerId = request.peer
        self.is_of_first_stage = message.stage == 1
        self.step = message.step
        self._request = request
        self._loop = asyncio.get_running_loop()

    def read(self) -> Batch:
        try:
            return self._parts.incoming.read(self._request)
        except Refused:  # what no sound peer sends counts against its sender, until that is banned
            self._loop.call_soon_threadsafe(self._parts.context.rpc.strike, self.sender)
            raise


class ReturnedMicrobatch(Microbatch):
    """One that comes back from the last stage, in a ring.

    The first delivery of an own one teaches the head (`learns`); a resent one came along another way.
    """

    learns = False

    def __init__(self, parts: StageParts, request: Request[Return]) -> None:
        message = request.message
        super().__init__(parts, f"{request.peer}/{message.microbatch}/back")
        self.origin: Origin = Origin(PeerId(message.home), message.draw)
        self._request = request

    def read(self) -> Batch:
        return self._parts.incoming.read(self._request, is_back=True)

    def head(self) -> Pending[LossAndAnswer]:
        """Head and loss, and the gradient that the last stage gets. Raises as `last_stage`."""
        self._commit()
        return self._parts.work.head(*self.read(), self.learns)
