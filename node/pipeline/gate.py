"""Takes exactly a batch of microbatches into each inner step, the rest into a short queue.

A microbatch admitted to a step runs forward and backward at that step's weights. The weights change only when
the gradients of all admitted ones are in. With a staleness of one, some of the next step's may run forward before
that; their backward passes wait until it has happened, so that each step still takes exactly its batch.

Those that wait take turns by network, then by sender: one that floods a stage gets its share and no more.

The number of microbatches between their forward and their backward pass is bounded: each keeps its activations.
`MicrobatchAdmission` decides, `Gate` makes microbatches wait or turns them away, and `Window` says how many are
useful.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from node.model.memory_model import QUEUE_BATCHES
from protocol.access.peer_limits import Bounded
from protocol.errors import NolocoError, Refused, TransportDown
from protocol.ground import PeerId

SPARE = 3  # times what hides the shortest answer: links stall, and peers that others use too take longer
MEASURED = 16


@dataclass(frozen=True)
class Sender:
    """Whose microbatch it is: the peer that sent it, and the group that shares turns with it, as a network does."""

    peer: PeerId
    group: Hashable


OWN = Sender(PeerId(""), None)  # of those that this node has drawn
MOST_SERVED = 1_024  # senders and groups of which the last turn is remembered


class Decision(Enum):
    ADMITTED = "admitted"
    AHEAD = "ahead"  # forward at once, backward in the next step
    QUEUED = "queued"
    FULL = "full"


class MicrobatchAdmission:
    """Decides which microbatches belong to the current inner step, which may run ahead, and which wait.

    `ahead` is how many of the next step's may run forward, at most a batch; `in_flight` how many of both may have run
    forward and not backward.
    """

    def __init__(self, batch: int, queue_limit: int, ahead: int = 0, in_flight: int | None = None) -> None:
        self.batch = batch
        self.queue_limit = queue_limit
        self._most_ahead = min(ahead, batch)
        self._in_flight = 2 * batch if in_flight is None else in_flight
        self._admitted: dict[str, bool] = {}  # id -> whether its gradient is in
        self._ahead: dict[str, None] = {}  # ordered
        self._queue: dict[str, Sender] = {}  # ordered
        self._turn = 0
        self._served = Bounded[PeerId | tuple[Hashable], int](
            MOST_SERVED
        )  # the last turns of peers and groups

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of microbatches whose forward pass may run and whose gradient is not in."""
        return sum(not done for done in self._admitted.values()) + len(self._ahead)

    def is_of_this_step(self, microbatch: str) -> bool:
        """Return whether the microbatch's backward pass may run."""
        return microbatch in self._admitted

    def before(self, microbatch: str) -> int:
        """The number of gradients or places that it waits for: of those at work, and those before it in the queue."""
        if microbatch not in self._queue:
            return 0
        return self.running + list(self._queue).index(microbatch)

    @property
    def counted(self) -> int:
        """The number of microbatches of the step that have their gradients in."""
        return sum(self._admitted.values())

    @property
    def complete(self) -> bool:
        """True if all microbatches of the step have their gradients in."""
        return len(self._admitted) == self.batch and all(self._admitted.values())

    def request(self, microbatch: str, sender: Sender = OWN) -> Decision:
        if not self._queue and self._has_place:
            self._note_turn(sender)
            if len(self._admitted) < self.batch:
                self._admitted[microbatch] = False
                return Decision.ADMITTED
            self._ahead[microbatch] = None
            return Decision.AHEAD
        if len(self._queue) < self.queue_limit:
            self._queue[microbatch] = sender
            return Decision.QUEUED
        return Decision.FULL

    def displace(self, sender: Sender) -> str | None:
        """Remove and return a queued microbatch to make room for one of `sender`; None if no other sender has more.

        It is the last one of the group with the most in the queue, and there of the peer with the most. That group,
        or that peer if it is of the sender's group, must have more in the queue than the sender's would then have.
        """
        peers = Counter(other.peer for other in self._queue.values())
        groups = Counter(other.group for other in self._queue.values())
        if not self._queue:
            return None

        def has(name: str) -> tuple[int, int]:
            other = self._queue[name]
            return groups[other.group], peers[other.peer]

        out = max(reversed(self._queue), key=has)
        other = self._queue[out]
        if other.group == sender.group:
            has_more = peers[other.peer] > peers[sender.peer] + 1
        else:
            has_more = groups[other.group] > groups[sender.group] + 1
        if not has_more:
            return None
        del self._queue[out]
        return out

    def _note_turn(self, sender: Sender) -> None:
        self._turn += 1
        self._served[sender.peer] = self._served[sender.group,] = self._turn

    def done(self, microbatch: str) -> list[str]:
        """Note that its gradient has been accumulated. Returns as `release` does."""
        if microbatch not in self._admitted:
            raise KeyError(f"microbatch {microbatch} was not admitted to this step")
        self._admitted[microbatch] = True
        return self._refill()

    def allow(self, in_flight: int) -> list[str]:
        """Bound the number in flight from now on; with 0 nobody is admitted any more. Returns as `release` does."""
        self._in_flight = in_flight
        return self._refill()

    def release(self, microbatch: str) -> list[str]:
        """Drop a microbatch that failed or was given up before its gradient was in.

        Returns those whose place is better than before: they may run forward, and backward if they are of this step.
        """
        if self._admitted.get(microbatch) is False:
            del self._admitted[microbatch]
        self._ahead.pop(microbatch, None)
        self._queue.pop(microbatch, None)
        return self._refill()

    def next_step(self) -> list[str]:
        """Empty the batch, as the weights have changed. Returns as `release` does."""
        self._admitted.clear()
        return self._refill()

    @property
    def _has_place(self) -> bool:
        """True if one more may run forward, in this step or ahead of the next."""
        has_room = len(self._admitted) < self.batch or len(self._ahead) < self._most_ahead
        return has_room and self.running < self._in_flight

    def _refill(self) -> list[str]:
        moved = []
        while self._ahead and len(self._admitted) < self.batch:
            microbatch = _first(self._ahead)
            self._admitted[microbatch] = False
            moved.append(microbatch)
        while self._queue and self._has_place:
            microbatch = self._next()
            if len(self._admitted) < self.batch:
                self._admitted[microbatch] = False
            else:
                self._ahead[microbatch] = None
            moved.append(microbatch)
        return moved

    def _next(self) -> str:
        """Take from the queue the first one of the group, and then the peer, whose last turn was longest ago."""

        def last_turns(name: str) -> tuple[int, int]:
            sender = self._queue[name]
            return self._served.get((sender.group,), 0), self._served.get(sender.peer, 0)

        chosen = min(self._queue, key=last_turns)
        self._note_turn(self._queue.pop(chosen))
        return chosen


def _first(waiting: dict[str, None]) -> str:
    microbatch = next(iter(waiting))
    del waiting[microbatch]
    return microbatch


class Gate:
    """Holds each microbatch until the inner step that it belongs to may take it."""

    def __init__(self, batch: int, staleness: int, in_flight: int) -> None:
        self._admission = MicrobatchAdmission(batch, QUEUE_BATCHES * batch, staleness * batch, in_flight)
        self._turns: dict[
            str, asyncio.Future[None]
        ] = {}  # by place, of those that wait for their forward pass
        self._backward_turns: dict[str, asyncio.Future[None]] = {}  # and for their backward pass
        self._draining = False  # everything passes, since no step will come any more
        self._complete = asyncio.Event()
        self._idle = asyncio.Event()
        self._held = False

    def __repr__(self) -> str:
        admission = self._admission
        state = ", draining" if self._draining else ", held" if self._held else ""
        return (
            f"<Gate: {admission.counted} of {admission.batch} gradients in, {admission.running} running, "
            f"{admission.waiting} waiting{state}>"
        )

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def backlog(self) -> int:
        """Microbatches that run or wait here. Raises `Refused` "busy" when one more would not be taken."""
        if self._held:
            raise Refused("busy", "this replica is at the end of its round")
        if self.waiting >= self._admission.queue_limit:
            raise Refused("busy", f"{self.waiting} microbatches wait here already")
        return self._admission.running + self.waiting

    @property
    def is_busy(self) -> bool:
        return bool(self._admission.running or self._admission.waiting)

    @property
    def gradients_in(self) -> int:
        """The number of microbatches of this step that count already."""
        return self._admission.counted

    def before(self, microbatch: str) -> int:
        """The number of microbatches before it, while it waits for its forward pass."""
        return self._admission.before(microbatch)

    async def enter(self, microbatch: str, sender: Sender = OWN) -> None:
        """Return once its forward pass may run. Raises `Refused` "busy" when too many wait, also of other senders."""
        if self._held:
            raise Refused("busy", "this replica is at the end of its round")
        decision = self._admission.request(microbatch, sender)
        if decision is Decision.FULL and (out := self._admission.displace(sender)) is not None:
            _refuse(self._turns.get(out), Refused("busy", "other senders' microbatches wait here"))
            decision = self._admission.request(microbatch, sender)
        if decision is Decision.FULL:
            raise Refused("busy", f"{self.waiting} microbatches wait here already")
        if decision is not Decision.QUEUED:
            return
        try:
            await self._wait(self._turns, microbatch)
        except BaseException:
            self._wake(self._admission.release(microbatch))
            raise

    async def backward(self, microbatch: str) -> None:
        """Return once its backward pass may run: in the step that takes its gradient.

        Raises `Refused` "busy" when that is not soon: another replica takes it.
        """
        if self._draining or self._admission.is_of_this_step(microbatch):
            return
        if self._held:
            raise Refused("busy", "this replica is at the end of its round")
        await self._wait(self._backward_turns, microbatch)

    async def _wait(self, turns: dict[str, asyncio.Future[None]], microbatch: str) -> None:
        turn = turns[microbatch] = asyncio.get_running_loop().create_future()
        try:
            await turn
        finally:
            turns.pop(microbatch, None)

    def allow(self, in_flight: int) -> None:
        """Bound how many microbatches may be between their forward and backward passes from now on."""
        if not self._draining:
            self._wake(self._admission.allow(in_flight))

    def done(self, microbatch: str) -> None:
        """Note that its gradient is in."""
        if self._draining and not self._admission.is_of_this_step(microbatch):
            self.give_up(microbatch)
            return
        self._wake(self._admission.done(microbatch))
        if self._admission.complete:
            self._complete.set()
        self._tell_when_idle()

    def give_up(self, microbatch: str) -> None:
        """Free the place of a microbatch that failed before its gradient was in."""
        self._wake(self._admission.release(microbatch))
        self._tell_when_idle()

    async def complete(self) -> None:
        """Wait until the gradients of exactly one batch are in."""
        await self._complete.wait()

    def next_step(self) -> None:
        """Admit the microbatches that waited, as the weights have changed."""
        self._complete.clear()
        self._held = False
        self._wake(self._admission.next_step())

    def hold(self) -> None:
        """Send waiting microbatches elsewhere and refuse new ones until the next step.

        A replica that waits for its partner must not keep the work that the partner needs to get there.
        """
        self._held = True
        self._turn_away(Refused("busy", "this replica is at the end of its round"))

    async def idle(self) -> None:
        """Wait until nothing that was admitted is still running. No step comes any more: all may run backward."""
        self._draining = True
        self._admission.allow(0)
        for turn in list(self._backward_turns.values()):
            _release(turn)
        self._idle.clear()
        if self._admission.running:
            await self._idle.wait()

    def close(self) -> None:
        self._held = True
        self._turn_away(TransportDown("this node is leaving"))

    def _turn_away(self, reason: NolocoError) -> None:
        for turn in [*self._turns.values(), *self._backward_turns.values()]:
            _refuse(turn, reason)

    def _wake(self, moved: Sequence[str]) -> None:
        for microbatch in moved:
            _release(self._turns.get(microbatch))
            if self._admission.is_of_this_step(microbatch):
                _release(self._backward_turns.get(microbatch))

    def _tell_when_idle(self) -> None:
        if not self._admission.running:
            self._idle.set()


def _refuse(turn: asyncio.Future[None] | None, reason: NolocoError) -> None:
    if turn is not None and not turn.done():
        turn.set_exception(reason)


def _release(turn: asyncio.Future[None] | None) -> None:
    if turn is not None and not turn.done():
        turn.set_result(None)


class Window:
    """The number of microbatches to keep in flight, so that waiting for their answers costs no time.

    `most` is what the memory allows.
    """

    def __init__(self, batch: int, most: int) -> None:
        self._most = most
        self._answers: deque[float] = deque(maxlen=max(MEASURED, batch))

    def in_flight(self, answer_seconds: float, compute_seconds: float) -> int:
        """The number after another answer, given the time that this device computes for one microbatch."""
        self._answers.append(answer_seconds)
        hidden = math.ceil(min(self._answers) / max(compute_seconds, 1e-6))
        return max(1, min(self._most, SPARE * (hidden + 1)))
