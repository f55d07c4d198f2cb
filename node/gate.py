"""Waiting for a place in an inner step: `Admission` decides, this makes microbatches wait or turns them away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.admission import Admission, Decision
from protocol.errors import NolocoError, Refused, TransportDown

QUEUE_BATCHES = 2  # microbatches that may wait here, in batches of an inner step


class Gate:
    """Mutable state: the admission, a future for each waiting microbatch, and whether the gate is held."""

    def __init__(self, batch: int) -> None:
        self._admission = Admission(batch, QUEUE_BATCHES * batch)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._complete = asyncio.Event()
        self._idle = asyncio.Event()
        self._held = False

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def is_busy(self) -> bool:
        return bool(self._admission.running or self._admission.waiting)

    async def enter(self, microbatch: str) -> None:
        """Return once the microbatch is admitted to a step. Raises `Refused` "busy" when too many wait."""
        if self._held:
            raise Refused("busy", "this replica is at the end of its round")
        decision = self._admission.request(microbatch)
        if decision is Decision.FULL:
            raise Refused("busy", f"{self.waiting} microbatches wait here already")
        if decision is Decision.ADMITTED:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[microbatch] = turn
        try:
            await turn
        except BaseException:
            self._wake(self._admission.release(microbatch))
            raise
        finally:
            self._turns.pop(microbatch, None)

    def done(self, microbatch: str) -> None:
        """Its gradient is in."""
        self._admission.done(microbatch)
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
        """Wait until nothing that was admitted is still running."""
        self._idle.clear()
        if self._admission.running:
            await self._idle.wait()

    def close(self) -> None:
        self._held = True
        self._turn_away(TransportDown("this node is leaving"))

    def _turn_away(self, reason: NolocoError) -> None:
        for turn in list(self._turns.values()):
            if not turn.done():
                turn.set_exception(reason)

    def _wake(self, admitted: Sequence[str]) -> None:
        for microbatch in admitted:
            turn = self._turns.get(microbatch)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _tell_when_idle(self) -> None:
        if not self._admission.running:
            self._idle.set()
