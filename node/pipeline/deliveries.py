"""Each microbatch is computed once, however often it is delivered, and not at all when nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from node.pipeline.passage import Passage
from protocol.answering import Status
from protocol.rpc import Answer
from protocol.supervision import Supervisor, cancelled

Work: TypeAlias = Callable[[Passage], Coroutine[Any, Any, Answer]]


@dataclass
class _Delivery:
    """Mutable state: how many deliveries wait for the answer."""

    passage: Passage
    task: asyncio.Task[Answer]
    askers: int = 0


class Deliveries:
    """Mutable state: the answers in progress, and the last ones that were given."""

    def __init__(self, supervisor: Supervisor, keep: int, new_passage: Callable[[], Passage]) -> None:
        """`keep` is how many are held in all, unless more are in progress."""
        self._supervisor = supervisor
        self._keep = keep
        self._new_passage = new_passage
        self._known: dict[str, _Delivery] = {}

    async def once(self, name: str, status: Status, work: Work) -> Answer:
        """The answer of `work`, of the first delivery of that name or of this one. `status` is how far it is.

        When the last one that waits is cancelled, the work is too, unless it counts already.
        """
        delivery = self._known.get(name) or self._begin(name, work)
        status.look = delivery.passage.progress
        delivery.askers += 1
        try:
            return await asyncio.shield(delivery.task)
        finally:
            delivery.askers -= 1
            if not delivery.askers and not delivery.task.done() and delivery.passage.give_up():
                self._forget(name, delivery)  # delivered again, it begins anew
                delivery.task.cancel()

    async def close(self) -> None:
        """Give up all that is in progress; whoever waits for it is cancelled."""
        await cancelled([delivery.task for delivery in self._known.values()])

    def _begin(self, name: str, work: Work) -> _Delivery:
        passage = self._new_passage()
        task = self._supervisor.start(work(passage), "a microbatch")
        delivery = self._known[name] = _Delivery(passage, task)
        ended = [known for known, other in self._known.items() if other.task.done()]
        for old in ended[: max(0, len(self._known) - self._keep)]:
            del self._known[old]

        def forget_failure(done: asyncio.Task[Answer]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._forget(name, delivery)

        task.add_done_callback(forget_failure)
        return delivery

    def _forget(self, name: str, delivery: _Delivery) -> None:
        if self._known.get(name) is delivery:
            del self._known[name]
