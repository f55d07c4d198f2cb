"""What the parts of one node share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from node.links.links import Links
from node.membership.view import View
from node.model.compute import Compute
from node.watch.counting import Tally
from node.watch.events import Events
from node.watch.trace import NO_TRACE, Trace
from protocol.manifest import Manifest
from protocol.rpc import Rpc
from protocol.supervision import Supervisor
from protocol.transport.base import PeerId, Transport

RATE_STEPS = 20  # inner steps over which tokens per second are measured
LEAST_MARKS = 3  # the first steps compile, and warm caches: what two of them show is no rate


@dataclass(frozen=True)
class _Mark:
    """Where the counts stood at the end of an inner step."""

    time: float
    tokens: int
    microbatches: int
    computing: float


@dataclass
class Throughput:
    """How fast this replica trains: what the length of its rounds goes by, and what others are told it can do.

    Mutable: counts since it took its stage, and where they stood at the end of the last inner steps.
    """

    tokens: int = 0
    microbatches: int = 0
    _marks: deque[_Mark] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))

    def mark(self, now: float, computing: float = 0.0) -> None:
        """An inner step ended at loop time `now`, after so many seconds of computing since the start."""
        self._marks.append(_Mark(now, self.tokens, self.microbatches, computing))

    def tokens_per_second(self) -> float:
        if len(self._marks) < 2 or self._marks[-1].time <= self._marks[0].time:
            return 0.0
        first, last = self._marks[0], self._marks[-1]
        return (last.tokens - first.tokens) / (last.time - first.time)

    def capacity(self) -> float | None:
        """Microbatches per second, forward and backward, were this node never to wait; None is not known yet.

        The rate that a node shows is that of the slowest stage; this one tells what it would do in a larger share.
        """
        if len(self._marks) < LEAST_MARKS or self._marks[-1].computing <= self._marks[0].computing:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last.microbatches - first.microbatches) / (last.computing - first.computing)


@dataclass
class Counters:
    """Numbers that people watch, and nothing is decided by. Written by the part that does the counted thing."""

    tokens: int = 0  # trained on at this stage, by earlier lives of this node as well
    tokens_stepped: int = 0  # those of them that were in the last inner step or before it
    loss: float | None = None  # mean training loss of the last step
    received: int = 0
    queue: int = 0  # microbatches that waited for a place when the last step ended
    sent: Tally = field(default_factory=Tally)
    resends: int = 0
    partners: Tally = field(default_factory=Tally)
    partner: str = ""
    spread: float | None = None  # of the replicas of this stage, from pair distances
    expected_spread: float | None = None  # what the theory says it should be
    blocked_seconds: float = 0.0
    data_wait: float | None = None  # fraction of the time in which stage 0 waited for data
    probe_breaches: int = 0  # others' probes that were too many, and answers to ours that were nonsense
    gossip_bytes: int = 0  # of contributions to rounds, as sent to partners

    def restore(self, tokens: int) -> None:
        """Go on counting where an earlier life of this node was."""
        self.tokens = self.tokens_stepped = tokens


@dataclass(frozen=True)
class Context:
    """The node's surroundings, handed to each of its parts."""

    me: PeerId
    run_id: str
    manifest: Manifest
    stage: int
    transport: Transport
    rpc: Rpc
    view: View
    compute: Compute
    events: Events
    counters: Counters
    throughput: Throughput = field(default_factory=Throughput)
    trace: Trace = NO_TRACE
    links: Links = field(default_factory=Links)
    supervisor: Supervisor = field(default_factory=Supervisor)  # of this stage's service

    @property
    def is_last(self) -> bool:
        """Whether microbatches turn here: the loss is computed, and no other peer's gradient is waited for."""
        return self.stage == self.manifest.hops - 1
