"""Each microbatch is computed once, however often it is delivered, and not at all when nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from node.pipeline.microbatch import Microbatch
from protocol.messages import Answer, Status
from protocol.messages.training import Gradient
from protocol.supervision import Supervisor, cancelled

M = TypeVar("M", bound=Microbatch)


class _Delivery:
    """One microbatch's answer, shared by all deliveries of it."""

    def __init__(
        self, microbatch: Microbatch, task: asyncio.Task[Answer[Gradient]], known: dict[str, _Delivery]
    ) -> None:
        self.microbatch: Microbatch | None = microbatch  # until the answer is there: its tensors are large
        self.task = task
        self.waiters = 0
        self._name = microbatch.name
        self._known = known
        known[self._name] = self
        task.add_done_callback(self._ended)

    def cancel_unless_it_counts(self) -> None:
        """Cancel the delivery and forget it: delivered again, the microbatch starts again."""
        if self.microbatch is not None and self.microbatch.cancel():
            self._forget()
            self.task.cancel()

    def _ended(self, task: asyncio.Task[Answer[Gradient]]) -> None:
        self.microbatch = None
        if task.cancelled() or task.exception() is not None:
            self._forget()

    def _forget(self) -> None:
        if self._known.get(self._name) is self:
            del self._known[self._name]


class Deliveries:
    """Computes each microbatch once, however often it is delivered, and remembers the answer for a while."""

    def __init__(self, supervisor: Supervisor, keep: int) -> None:
        """`keep` is how many are held in all, unless more are in progress."""
        self._supervisor = supervisor
        self._keep = keep
        self._known: dict[str, _Delivery] = {}

    def __repr__(self) -> str:
        running = sum(not delivery.task.done() for delivery in self._known.values())
        return f"<Deliveries: {running} in progress, {len(self._known) - running} answers kept>"

    async def get_or_start(
        self, microbatch: M, status: Status, train: Callable[[M], Coroutine[Any, Any, Answer[Gradient]]]
    ) -> Answer[Gradient]:
        """The answer of `train`, to the first delivery of that name or to this one. `status` is how far it is.

        When the last one that waits is cancelled, the work is too, unless it counts already.
        """
        delivery = self._known.get(microbatch.name) or self._start(microbatch, train(microbatch))
        if delivery.microbatch is not None:
            status.look = delivery.microbatch.progress
        delivery.waiters += 1
        try:
            return await asyncio.shield(delivery.task)
        finally:
            delivery.waiters -= 1
            if not delivery.waiters and not delivery.task.done():
                delivery.cancel_unless_it_counts()

    async def close(self) -> None:
        """Give up all that is in progress; whoever waits for it is cancelled."""
        await cancelled([delivery.task for delivery in self._known.values()])

    def _start(self, microbatch: Microbatch, work: Coroutine[Any, Any, Answer[Gradient]]) -> _Delivery:
        delivery = _Delivery(microbatch, self._supervisor.start(work, "a microbatch"), self._known)
        ended = [known for known, other in self._known.items() if other.task.done()]
        for old in ended[: max(0, len(self._known) - self._keep)]:
            del self._known[old]
        return delivery
