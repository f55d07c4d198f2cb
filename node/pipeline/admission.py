"""Exactly the batch of microbatches into each inner step, the rest in a short queue. Pure.

A microbatch admitted to a step runs forward and backward at that step's weights. The weights change only when
the gradients of all admitted ones are in. With a staleness of one, some of the next step's may run forward before
that; their backward passes wait until it has happened, so that each step still takes exactly its batch.

How many are between their forward and their backward pass at a time is bounded: each keeps its activations.
"""

from __future__ import annotations

from enum import Enum


class Decision(Enum):
    ADMITTED = "admitted"
    AHEAD = "ahead"  # forward at once, backward in the next step
    QUEUED = "queued"
    FULL = "full"


class Admission:
    """Mutable state: the ids admitted to the current step, those of them done, those ahead of it, and the queue.

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
        self._queue: dict[str, None] = {}  # ordered

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """Those whose forward pass may run and whose gradient is not in."""
        return sum(not done for done in self._admitted.values()) + len(self._ahead)

    def is_of_this_step(self, microbatch: str) -> bool:
        """Whether its backward pass may run."""
        return microbatch in self._admitted

    def before(self, microbatch: str) -> int:
        """How many gradients or places it waits for: of those at work, and those before it in the queue."""
        if microbatch not in self._queue:
            return 0
        return self.running + list(self._queue).index(microbatch)

    @property
    def complete(self) -> bool:
        """All microbatches of the step have their gradients in."""
        return len(self._admitted) == self.batch and all(self._admitted.values())

    @property
    def gradients(self) -> int:
        """Gradients accumulated so far in this step."""
        return sum(self._admitted.values())

    def request(self, microbatch: str) -> Decision:
        if not self._queue and self._has_place:
            if len(self._admitted) < self.batch:
                self._admitted[microbatch] = False
                return Decision.ADMITTED
            self._ahead[microbatch] = None
            return Decision.AHEAD
        if len(self._queue) < self.queue_limit:
            self._queue[microbatch] = None
            return Decision.QUEUED
        return Decision.FULL

    def done(self, microbatch: str) -> list[str]:
        """Its gradient has been accumulated. Returns as `release` does."""
        if microbatch not in self._admitted:
            raise KeyError(f"microbatch {microbatch} was not admitted to this step")
        self._admitted[microbatch] = True
        return self._refill()

    def allow(self, in_flight: int) -> list[str]:
        """From now on so many may be in flight; with none nobody is admitted any more. Returns as `release` does."""
        self._in_flight = in_flight
        return self._refill()

    def release(self, microbatch: str) -> list[str]:
        """It failed or was given up before its gradient was in.

        Returns those whose place is better than before: they may run forward, and backward if they are of this step.
        """
        if self._admitted.get(microbatch) is False:
            del self._admitted[microbatch]
        self._ahead.pop(microbatch, None)
        self._queue.pop(microbatch, None)
        return self._refill()

    def next_step(self) -> list[str]:
        """The weights have changed: empty the batch. Returns as `release` does."""
        self._admitted.clear()
        return self._refill()

    @property
    def _has_place(self) -> bool:
        """Whether one more may run forward, in this step or ahead of the next."""
        has_room = len(self._admitted) < self.batch or len(self._ahead) < self._most_ahead
        return has_room and self.running < self._in_flight

    def _refill(self) -> list[str]:
        moved = []
        while self._ahead and len(self._admitted) < self.batch:
            microbatch = _first(self._ahead)
            self._admitted[microbatch] = False
            moved.append(microbatch)
        while self._queue and self._has_place:
            microbatch = _first(self._queue)
            if len(self._admitted) < self.batch:
                self._admitted[microbatch] = False
            else:
                self._ahead[microbatch] = None
            moved.append(microbatch)
        return moved


def _first(waiting: dict[str, None]) -> str:
    """Take out the one that came first."""
    microbatch = next(iter(waiting))
    del waiting[microbatch]
    return microbatch
