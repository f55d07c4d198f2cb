"""Exactly the batch of microbatches into each inner step, the rest in a short queue. Pure.

A microbatch admitted to a step runs forward and backward at that step's weights. The weights change only when
the gradients of all admitted ones are in, and nothing of the next step is admitted before.
"""

from __future__ import annotations

from enum import Enum


class Decision(Enum):
    ADMITTED = "admitted"
    QUEUED = "queued"
    FULL = "full"


class Admission:
    """Mutable state: the ids admitted to the current step, those of them done, and the queue."""

    def __init__(self, batch: int, queue_limit: int) -> None:
        self.batch = batch
        self.queue_limit = queue_limit
        self._admitted: dict[str, bool] = {}  # id -> whether its gradient is in
        self._queue: dict[str, None] = {}  # ordered

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return sum(not done for done in self._admitted.values())

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
        """It failed or was given up before its gradient was in. Returns those admitted in its place."""
        if self._admitted.get(microbatch) is False:
            del self._admitted[microbatch]
        self._queue.pop(microbatch, None)
        return self._refill()

    def next_step(self) -> list[str]:
        """The weights have changed: empty the batch. Returns the ids admitted from the queue."""
        self._admitted.clear()
        return self._refill()

    def _refill(self) -> list[str]:
        admitted = []
        while self._queue and len(self._admitted) < self.batch:
            microbatch = next(iter(self._queue))
            del self._queue[microbatch]
            self._admitted[microbatch] = False
            admitted.append(microbatch)
        return admitted
