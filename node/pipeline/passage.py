"""One microbatch on its way through this stage: how far it is, and whether it can still be given up."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from protocol.errors import Refused
from protocol.messages import Progress

P = ParamSpec("P")
T = TypeVar("T")


class Passage:
    """Mutable state: what it waits for, how often it got on, and who decides whether it counts.

    It counts from the moment at which the work begins that adds to the stage's gradients. Before, it can be given up
    without a trace; after, it is finished whoever waits. The compute thread decides the one, the loop the other.
    """

    def __init__(self) -> None:
        self._state: Literal["queued", "computing", "onward"] = "queued"
        self._done = 0
        self._done_onward = 0
        self._before: Callable[[], int] = lambda: 0
        self._ahead = 0  # as told last
        self._decided = threading.Lock()

    # --- how far it is ------------------------------------------------------------------------

    def queues(self, before: Callable[[], int]) -> None:
        """It waits for its turn behind `before()` microbatches."""
        self._state, self._before = "queued", before
        self._ahead = before()

    def computes(self) -> None:
        self._state, self._before = "computing", lambda: 0
        self._done += 1

    def goes_onward(self) -> None:
        """A later stage has it from now on, or another peer of it than before."""
        self._state, self._ahead = "onward", 0
        self._before = lambda: 0
        self._done += 1
        self._done_onward = 0

    def note_onward(self, progress: Progress) -> None:
        """The later stage says how far it is there."""
        self._before = lambda: progress.ahead
        if progress.done > self._done_onward:
            self._done += 1
        self._done_onward = progress.done

    def progress(self) -> Progress:
        """What its sender is told. Whenever fewer are before it than last time it got on."""
        ahead = self._before()
        if ahead < self._ahead:
            self._done += 1
        self._ahead = ahead
        return Progress(state=self._state, ahead=ahead, done=self._done)

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
