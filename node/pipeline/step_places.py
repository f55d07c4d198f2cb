"""The places of an inner step: exactly a batch of microbatches in each, a few of the next ahead, the rest in a queue.

Those that wait take turns by network, then by sender: one that floods a stage gets its share and no more.

The number of microbatches between their forward and their backward pass is bounded: each keeps its activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from protocol.access.peer_limits import Bounded
from protocol.ground import PeerId


@dataclass(frozen=True)
class Sender:
    """Whose microbatch it is: the peer that sent it, and the group that shares turns with it, as a network does."""

    peer: PeerId
    group: Hashable


OWN = Sender(PeerId(""), None)  # of those that this node has drawn
MOST_SERVED = 1_024  # senders and groups of which the last turn is remembered


class Decision(Enum):
    ADMITTED = "admitted"
    AHEAD = "ahead"  # forward at once, backward in the next step
    QUEUED = "queued"
    FULL = "full"


class StepPlaces:
    """Decides which microbatches belong to the current inner step, which may run ahead, and which wait.

    `ahead` is how many of the next step's may run forward, at most a batch; `in_flight` how many of both may have run
    forward and not backward.
    """

    def __init__(self, batch: int, queue_limit: int, ahead: int, in_flight: int) -> None:
        self.batch = batch
        self.queue_limit = queue_limit
        self._most_ahead = min(ahead, batch)
        self._in_flight = in_flight
        self._admitted: dict[str, bool] = {}  # id -> whether its gradient is in
        self._ahead: dict[str, None] = {}  # ordered
        self._queue: dict[str, Sender] = {}  # ordered
        self._turn = 0
        # the last turns of peers and groups
        self._served = Bounded[PeerId | tuple[Hashable], int](MOST_SERVED)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of microbatches whose forward pass may run and whose gradient is not in."""
        return sum(not done for done in self._admitted.values()) + len(self._ahead)

    def is_of_this_step(self, microbatch: str) -> bool:
        """Return whether the microbatch's backward pass may run."""
        return microbatch in self._admitted

    def before(self, microbatch: str) -> int:
        """The number of gradients or places that it waits for: of those at work, and those before it in the queue."""
        if microbatch not in self._queue:
            return 0
        return self.running + list(self._queue).index(microbatch)

    @property
    def counted(self) -> int:
        """The number of microbatches of the step that have their gradients in."""
        return sum(self._admitted.values())

    @property
    def complete(self) -> bool:
        """True if all microbatches of the step have their gradients in."""
        return len(self._admitted) == self.batch and all(self._admitted.values())

    def request(self, microbatch: str, sender: Sender = OWN) -> Decision:
        if not self._queue and self._has_place:
            self._note_turn(sender)
            if len(self._admitted) < self.batch:
                self._admitted[microbatch] = False
                return Decision.ADMITTED
            self._ahead[microbatch] = None
            return Decision.AHEAD
        if len(self._queue) < self.queue_limit:
            self._queue[microbatch] = sender
            return Decision.QUEUED
        return Decision.FULL

    def displace(self, sender: Sender) -> str | None:
        """Remove and return a queued microbatch to make room for one of `sender`; None if no other sender has more.

        It is the last one of the group with the most in the queue, and there of the peer with the most. That group,
        or that peer if it is of the sender's group, must have more in the queue than the sender's would then have.
        """
        peers = Counter(other.peer for other in self._queue.values())
        groups = Counter(other.group for other in self._queue.values())
        if not self._queue:
            return None

        def has(name: str) -> tuple[int, int]:
            other = self._queue[name]
            return groups[other.group], peers[other.peer]

        out = max(reversed(self._queue), key=has)
        other = self._queue[out]
        if other.group == sender.group:
            has_more = peers[other.peer] > peers[sender.peer] + 1
        else:
            has_more = groups[other.group] > groups[sender.group] + 1
        if not has_more:
            return None
        del self._queue[out]
        return out

    def _note_turn(self, sender: Sender) -> None:
        self._turn += 1
        self._served[sender.peer] = self._served[sender.group,] = self._turn

    def done(self, microbatch: str) -> list[str]:
        """Note that its gradient has been accumulated. Returns as `release` does."""
        if microbatch not in self._admitted:
            raise KeyError(f"microbatch {microbatch} was not admitted to this step")
        self._admitted[microbatch] = True
        return self._refill()

    def allow(self, in_flight: int) -> list[str]:
        """Bound the number in flight from now on; with 0 nobody is admitted any more. Returns as `release` does."""
        self._in_flight = in_flight
        return self._refill()

    def release(self, microbatch: str) -> list[str]:
        """Drop a microbatch that failed or was given up before its gradient was in.

        Returns those whose place is better than before: they may run forward, and backward if they are of this step.
        """
        if self._admitted.get(microbatch) is False:
            del self._admitted[microbatch]
        self._ahead.pop(microbatch, None)
        self._queue.pop(microbatch, None)
        return self._refill()

    def next_step(self) -> list[str]:
        """Empty the batch, as the weights have changed. Returns as `release` does."""
        self._admitted.clear()
        return self._refill()

    @property
    def _has_place(self) -> bool:
        """True if one more may run forward, in this step or ahead of the next."""
        has_room = len(self._admitted) < self.batch or len(self._ahead) < self._most_ahead
        return has_room and self.running < self._in_flight

    def _refill(self) -> list[str]:
        moved = []
        while self._ahead and len(self._admitted) < self.batch:
            microbatch = _first(self._ahead)
            self._admitted[microbatch] = False
            moved.append(microbatch)
        while self._queue and self._has_place:
            microbatch = self._next()
            if len(self._admitted) < self.batch:
                self._admitted[microbatch] = False
            else:
                self._ahead[microbatch] = None
            moved.append(microbatch)
        return moved

    def _next(self) -> str:
        """Take from the queue the first one of the group, and then the peer, whose last turn was longest ago."""

        def last_turns(name: str) -> tuple[int, int]:
            sender = self._queue[name]
            return self._served.get((sender.group,), 0), self._served.get(sender.peer, 0)

        chosen = min(self._queue, key=last_turns)
        self._note_turn(self._queue.pop(chosen))
        return chosen


def _first(waiting: dict[str, None]) -> str:
    microbatch = next(iter(waiting))
    del waiting[microbatch]
    return microbatch
