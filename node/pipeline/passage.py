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
