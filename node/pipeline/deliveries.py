"""Each microbatch is computed once, however often it is delivered, and not at all when nobody waits for it.

`Passage` is one microbatch on its way through this stage: how far it is, and whether it can still be given up.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from protocol.errors import Refused
from protocol.messages import Answer, Progress, Status
from protocol.messages.training import Gradient
from protocol.supervision import Supervisor, cancelled

P = ParamSpec("P")
T = TypeVar("T")


class Passage:
    """One microbatch on its way through this stage: counted once, and given up only while it leaves no trace.

    Mutable state: what it waits for, how often it got on, and who decides whether it counts.

    It counts from the moment at which the work begins that adds to the stage's gradients. Before, it can be given up
    without a trace; after, it is finished whoever waits. The compute thread decides the one, the loop the other.
    """

    def __init__(self, pieces: Callable[[], int] = lambda: 0) -> None:
        """`pieces` is how many pieces of training work the device has finished so far."""
        self._state: Literal["queued", "computing", "onward"] = "queued"
        self._before: Callable[[], int] = lambda: 0
        self._pieces = pieces
        self._since = pieces()  # when it came to be in this state
        self._done = 0  # until then
        self._done_onward = 0
        self._decided = threading.Lock()

    # --- how far it is ------------------------------------------------------------------------

    def queues(self, before: Callable[[], int]) -> None:
        """It waits for its turn behind `before()` microbatches."""
        self._enter("queued", before)

    def computes(self) -> None:
        """The device has it, or it is among the next."""
        self._enter("computing", lambda: 0)

    def goes_onward(self) -> None:
        """A later stage has it from now on, or another peer of it than before."""
        self._enter("onward", lambda: 0)
        self._done_onward = 0

    def note_onward(self, progress: Progress) -> None:
        """The later stage says how far it is there."""
        self._before = lambda: progress.ahead
        self._done += progress.done > self._done_onward
        self._done_onward = progress.done

    def progress(self) -> Progress:
        """What its sender is told. Whatever the device finishes while it is here brings its turn closer."""
        return Progress(state=self._state, ahead=self._before(), done=self._done + self._finished())

    def _enter(self, state: Literal["queued", "computing", "onward"], before: Callable[[], int]) -> None:
        self._done += 1 + self._finished()
        self._state, self._before, self._since = state, before, self._pieces()

    def _finished(self) -> int:
        return 0 if self._state == "onward" else self._pieces() - self._since

    # --- whether it counts --------------------------------------------------------------------

    def counting(self, work: Callable[P, T]) -> Callable[P, T]:
        """`work`, which adds to the gradients: from its beginning on the microbatch counts.

        Raises `Refused` "given-up" instead of beginning when it was given up.
        """

        @functools.wraps(work)
        def count(*args: P.args, **kwargs: P.kwargs) -> T:
            if not self._decided.acquire(blocking=False):
                raise Refused("given-up", "nobody waits for this microbatch any more")
            return work(*args, **kwargs)

        return count

    def give_up(self) -> bool:
        """Whether it will not count, as nobody waits for it; False once it does."""
        return self._decided.acquire(blocking=False)


Work: TypeAlias = Callable[[Passage], Coroutine[Any, Any, Answer[Gradient]]]


@dataclass
class _Delivery:
    """One microbatch's answer, shared by all deliveries of it.

    Mutable state: how many deliveries wait for the answer.
    """

    passage: Passage
    task: asyncio.Task[Answer[Gradient]]
    askers: int = 0


class Deliveries:
    """Computes each microbatch once, however often it is delivered, and remembers the answer for a while.

    Mutable state: the answers in progress, and the last ones that were given.
    """

    def __init__(self, supervisor: Supervisor, keep: int, new_passage: Callable[[], Passage]) -> None:
        """`keep` is how many are held in all, unless more are in progress."""
        self._supervisor = supervisor
        self._keep = keep
        self._new_passage = new_passage
        self._known: dict[str, _Delivery] = {}

    async def once(self, name: str, status: Status, work: Work) -> Answer[Gradient]:
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
                self._forget(name, delivery)  # delivered again, it starts again
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

        def forget_failure(done: asyncio.Task[Answer[Gradient]]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._forget(name, delivery)

        task.add_done_callback(forget_failure)
        return delivery

    def _forget(self, name: str, delivery: _Delivery) -> None:
        if self._known.get(name) is delivery:
            del self._known[name]
