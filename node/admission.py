"""Exactly the batch of microbatches into each inner step, the rest in a short queue. Pure.

A microbatch admitted to a step runs forward and backward at that step's weights. The weights change only when
the gradients of all admitted ones are in. With a staleness of one, some of the next step's may run forward before
that; their backward passes wait until it has happened, so that each step still takes exactly its batch.
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

    `ahead` is how many of the next step's may run forward, at most a batch; it may change at any time.
    """

    def __init__(self, batch: int, queue_limit: int, ahead: int = 0) -> None:
        self.batch = batch
        self.queue_limit = queue_limit
        self.ahead = ahead
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

    @property
    def complete(self) -> bool:
        """All microbatches of the step have their gradients in."""
        return len(self._admitted) == self.batch and all(self._admitted.values())

    @property
    def gradients(self) -> int:
        """Gradients accumulated so far in this step."""
        return sum(self._admitted.values())

    def request(self, microbatch: str) -> Decision:
        if len(self._admitted) < self.batch and not self._queue:
            self._admitted[microbatch] = False
            return Decision.ADMITTED
        if len(self._admitted) == self.batch and self._has_room_ahead and not self._queue:
            self._ahead[microbatch] = None
            return Decision.AHEAD
        if len(self._queue) < self.queue_limit:
            self._queue[microbatch] = None
            return Decision.QUEUED
        return Decision.FULL

    def done(self, microbatch: str) -> None:
        """Its gradient has been accumulated."""
        if microbatch not in self._admitted:
            raise KeyError(f"microbatch {microbatch} was not admitted to this step")
        self._admitted[microbatch] = True

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
    def _has_room_ahead(self) -> bool:
        return len(self._ahead) < min(self.ahead, self.batch)

    def _refill(self) -> list[str]:
        moved = []
        for source in (self._ahead, self._queue):
            while source and len(self._admitted) < self.batch:
                microbatch = next(iter(source))
                del source[microbatch]
                self._admitted[microbatch] = False
                moved.append(microbatch)
        while self._queue and self._has_room_ahead:
            microbatch = next(iter(self._queue))
            del self._queue[microbatch]
            self._ahead[microbatch] = None
            moved.append(microbatch)
        return moved
