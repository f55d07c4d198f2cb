"""Waiting for a place in an inner step: `Admission` decides, this makes microbatches wait or turns them away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.model.memory_model import QUEUE_BATCHES
from node.pipeline.admission import Admission, Decision
from protocol.errors import NolocoError, Refused, TransportDown


class Gate:
    """Mutable state: the admission, a future for each microbatch that waits for its forward or its backward pass,
    and whether the gate is held or everything passes since no step will come any more.
    """

    def __init__(self, batch: int, staleness: int, in_flight: int) -> None:
        self._admission = Admission(batch, QUEUE_BATCHES * batch, staleness * batch, in_flight)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._backward_turns: dict[str, asyncio.Future[None]] = {}
        self._draining = False
        self._complete = asyncio.Event()
        self._idle = asyncio.Event()
        self._held = False

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def is_busy(self) -> bool:
        return bool(self._admission.running or self._admission.waiting)

    def before(self, microbatch: str) -> int:
        """How many microbatches come before it, while it waits for its forward pass."""
        return self._admission.before(microbatch)

    async def enter(self, microbatch: str) -> None:
        """Return once its forward pass may run. Raises `Refused` "busy" when too many wait."""
        if self._held:
            raise Refused("busy", "this replica is at the end of its round")
        decision = self._admission.request(microbatch)
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
        """How many microbatches may be between their forward and backward passes from now on."""
        if not self._draining:
            self._wake(self._admission.allow(in_flight))

    def done(self, microbatch: str) -> None:
        """Its gradient is in."""
        if self._draining and not self._admission.is_of_this_step(microbatch):
            self.give_up(microbatch)
            return
        self._wake(self._admission.done(microbatch))
        if self._admission.complete:
            self._complete.set()
        self._tell_when_idle()

    def give_up(self, microbatch: str) -> None:
        """It failed before its gradient was in: its place is free again."""
        self._wake(self._admission.release(microbatch))
        self._tell_when_idle()

    async def complete(self) -> None:
        """Wait until the gradients of exactly one batch are in."""
        await self._complete.wait()

    def next_step(self) -> None:
        """The weights have changed: admit those that waited."""
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
            if not turn.done():
                turn.set_exception(reason)

    def _wake(self, moved: Sequence[str]) -> None:
        for microbatch in moved:
            _release(self._turns.get(microbatch))
            if self._admission.is_of_this_step(microbatch):
                _release(self._backward_turns.get(microbatch))

    def _tell_when_idle(self) -> None:
        if not self._admission.running:
            self._idle.set()


def _release(turn: asyncio.Future[None] | None) -> None:
    if turn is not None and not turn.done():
        turn.set_result(None)
