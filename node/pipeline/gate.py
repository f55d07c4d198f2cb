"""Holds each microbatch of the daemon until `Admission` lets it run or turns it away; how many are useful at once."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from node.pipeline import admission
from node.pipeline.step_places import OWN, Sender
from protocol.errors import NolocoError, Refused, TransportDown

SPARE = 3  # times what hides the shortest answer: links stall, and peers that others use too take longer
MEASURED = 16


class Gate:
    """Makes each microbatch wait for what `Admission` decides.

    Mutable state besides: the microbatches that wait for their forward pass or their backward pass.
    """

    def __init__(self, batch: int, staleness: int, in_flight: int) -> None:
        self._admission = admission.Admission(batch, staleness, in_flight)
        self._turns: dict[str, asyncio.Future[None]] = {}  # by place; each waits for one pass
        self._complete = asyncio.Event()
        self._idle = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Gate: {self._admission}>"

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def backlog(self) -> int:
        """Microbatches that run or wait here. Raises `Refused` "busy" when one more would not be taken."""
        if (why := self._admission.why_busy()) is not None:
            raise Refused("busy", why)
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
        await self._wait(microbatch, admission.Asked(microbatch, sender))

    async def backward(self, microbatch: str) -> None:
        """Return once its backward pass may run: in the step that takes its gradient.

        Raises `Refused` "busy" when that is not soon: another replica takes it.
        """
        await self._wait(microbatch, admission.GradientCame(microbatch))

    async def _wait(self, microbatch: str, event: admission.Event) -> None:
        """Wait for what follows from the event. Where that fails, its place is free."""
        turn = self._turns[microbatch] = asyncio.get_running_loop().create_future()
        try:
            self._handle(event)
            await turn
        except BaseException:
            self.give_up(microbatch)
            raise
        finally:
            del self._turns[microbatch]

    def _handle(self, event: admission.Event, refusal: NolocoError | None = None) -> None:
        """Carry out what follows from the event; `refusal` says it in place of "busy"."""
        for action in self._admission.handle(event):
            match action:
                case admission.Forward(microbatch) | admission.Backward(microbatch):
                    if (turn := self._turn_of(microbatch)) is not None:
                        turn.set_result(None)
                case admission.Refuse(microbatch, why):
                    if (turn := self._turn_of(microbatch)) is not None:
                        turn.set_exception(refusal or Refused("busy", why))
                case admission.TakeStep():
                    self._complete.set()

    def _turn_of(self, microbatch: str) -> asyncio.Future[None] | None:
        """Return what the microbatch waits for, unless it was cancelled meanwhile."""
        turn = self._turns.get(microbatch)
        return None if turn is None or turn.done() else turn

    def allow(self, in_flight: int) -> None:
        """Bound how many microbatches may be between their forward and backward passes from now on."""
        self._handle(admission.Allowed(in_flight))

    def done(self, microbatch: str) -> None:
        """Note that its gradient is in."""
        self._handle(admission.Counted(microbatch))
        self._tell_when_idle()

    def give_up(self, microbatch: str) -> None:
        """Free the place of a microbatch that failed before its gradient was in."""
        self._handle(admission.GivenUp(microbatch))
        self._tell_when_idle()

    async def complete(self) -> None:
        """Wait until the gradients of exactly one batch are in."""
        await self._complete.wait()

    def next_step(self) -> None:
        """Admit the microbatches that waited, as the weights have changed."""
        self._complete.clear()
        self._handle(admission.StepBegan())

    def hold(self) -> None:
        """Send waiting microbatches elsewhere and refuse new ones until the next step.

        A replica that waits for its partner must not keep the work that the partner needs to get there.
        """
        self._handle(admission.Held())

    async def idle(self) -> None:
        """Wait until nothing that was admitted is still running. No step comes any more: all may run backward."""
        self._handle(admission.Draining())
        self._idle.clear()
        if self._admission.running:
            await self._idle.wait()

    def close(self) -> None:
        """Turn everything away that waits; nothing is admitted any more."""
        self._handle(admission.Held(), TransportDown("this node is leaving"))

    def _tell_when_idle(self) -> None:
        if not self._admission.running:
            self._idle.set()


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
