"""The surroundings that a node's parts share, and what others see of it: its record, and its numbers when asked."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from node.giving.ledger import ContributionLedger
from node.links.links import Links
from node.membership.hearsay import hear_about
from node.membership.membership import Membership
from node.membership.others_past import ask_of_past
from node.membership.past import Past
from node.membership.view import View
from node.model.compute import Compute
from node.model.replica import Replica
from node.model.stage import work_of
from node.watch.counting import Tally
from node.watch.device_use import DeviceUse, device_use
from node.watch.events import Events, finite
from node.watch.loss_history import LossHistory
from node.watch.trace import NO_TRACE, Trace
from protocol.ground import PeerId
from protocol.messages.peers import MOST_TOLD_PEERS, Awaited, HistoryPoint, NodeStats
from protocol.records.announcement import Announcement, State
from protocol.rpc.compatibility import FEATURES
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport
from protocol.version import MINOR, PROTOCOL, own_version
from protocol.windows import counted, short, window

RATE_STEPS = 20  # inner steps over which tokens per second are measured
OVERDUE = 3.0  # times the usual: a step that takes longer tells that the rate has fallen
OPERATIONS = 6  # of a multiplication forward: it and an addition, and twice as many backward
LEAST_MARKS = 3  # the first steps compile, and warm caches: what two of them show is no rate


@dataclass(frozen=True)
class _Mark:
    """The counts at the end of an inner step."""

    time: float
    tokens: int
    microbatches: int
    computing: float


@dataclass
class Throughput:
    """The speed at which this replica trains: the length of its rounds goes by it, and others are told of it.

    It counts since the replica took its stage, and marks where the counts stood at the end of the last inner steps.
    """

    most: float = math.inf  # microbatches per second that the volunteer's bandwidth limits allow
    tokens: int = 0
    microbatches: int = 0
    _marks: deque[_Mark] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))

    @window
    def __repr__(self) -> str:
        trained = f"{self.tokens:,} tokens in {counted(self.microbatches, 'microbatch', 'microbatches')}"
        return f"Trained: {trained} | Rate: {self.tokens_per_second():,.1f} tokens/s"

    def mark(self, now: float, computing: float = 0.0) -> None:
        """Note that an inner step ended at loop time `now`, after so many seconds of computing since the start."""
        self._marks.append(_Mark(now, self.tokens, self.microbatches, computing))

    def tokens_per_second(self, now: float | None = None) -> float:
        """The rate at loop time `now`, if given: less and less once a step takes far longer than earlier ones."""
        if len(self._marks) < 2 or self._marks[-1].time <= self._marks[0].time:
            return 0.0
        first, last = self._marks[0], self._marks[-1]
        seconds, tokens = last.time - first.time, last.tokens - first.tokens
        usual = seconds / (len(self._marks) - 1)
        if now is not None and now - last.time > OVERDUE * usual:
            return tokens / seconds * usual / (now - last.time)
        return tokens / seconds

    def age(self, now: float) -> float | None:
        """Seconds since the last inner step ended; None before the first."""
        return now - self._marks[-1].time if self._marks else None

    def capacity(self, share: float = 1.0) -> float | None:
        """Microbatches per second, forward and backward, were this node never to wait; None is not known yet.

        Within what its volunteer allows, `share` of the time and the bandwidth. The rate that a node shows is that of
        the slowest stage; this one tells what it would do in a larger share.
        """
        if len(self._marks) < LEAST_MARKS or self._marks[-1].computing <= self._marks[0].computing:
            return None
        first, last = self._marks[0], self._marks[-1]
        return min(
            self.most, share * (last.microbatches - first.microbatches) / (last.computing - first.computing)
        )


@dataclass
class Counters:
    """Numbers that people watch, and nothing is decided by. Written by the part that does the counted thing."""

    tokens: int = 0  # trained on at this stage, by earlier lives of this node as well
    tokens_stepped: int = 0  # those of them that were in the last inner step or before it
    loss: float | None = None  # mean training loss of the last step
    losses: LossHistory = field(default_factory=LossHistory)
    no_peer_since: float | None = None  # elapsed seconds: since then nobody serves the next stage
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
    cannot_save: bool = False  # the last checkpoint could not be written

    def restore(self, tokens: int) -> None:
        """Go on counting where an earlier life of this node was."""
        self.tokens = self.tokens_stepped = tokens


@dataclass(frozen=True)
class Context:
    """The surroundings of a node's parts while it serves one stage: the run as it reached it, and that stage."""

    membership: Membership
    stage: int
    compute: Compute
    counters: Counters = field(default_factory=Counters)
    throughput: Throughput = field(default_factory=Throughput)
    supervisor: Supervisor = field(default_factory=Supervisor)  # of this stage's service
    trace: Trace = NO_TRACE
    name: str = ""  # what the volunteer calls this node
    random: Callable[[], random.Random] = random.Random  # another generator at each call

    @window
    def __repr__(self) -> str:
        stages, run = self.manifest.stages, self.manifest.name
        return f"Peer: {short(self.me)} | Run: {run} | Stage: {self.stage} of {stages} | Name: {self.name or '-'}"

    @property
    def me(self) -> PeerId:
        return self.membership.me

    @property
    def run_id(self) -> str:
        return self.membership.run_id

    @property
    def manifest(self) -> Manifest:
        return self.membership.manifest

    @property
    def transport(self) -> Transport:
        return self.membership.transport

    @property
    def rpc(self) -> Rpc:
        return self.membership.rpc

    @property
    def view(self) -> View:
        return self.membership.view

    @property
    def links(self) -> Links:
        return self.membership.links

    @property
    def events(self) -> Events:
        return self.membership.events

    @property
    def past(self) -> Past:
        return self.membership.past

    @property
    def contributions(self) -> ContributionLedger:
        return self.membership.contributions

    @property
    def is_last(self) -> bool:
        """True if microbatches turn here: the loss is computed, and no other peer's gradient is waited for."""
        return self.stage == self.manifest.hops - 1

    async def hear_about(self, asked: PeerId, named: PeerId, deadline: float) -> None:
        """Ask a peer for the record of a replica of this stage that it has named, see `hearsay.hear_about`."""
        await hear_about(self.membership, self.stage, asked, named, deadline)

    async def ask_of_past(self) -> None:
        """Ask other peers what they remember of this stage, see `others_past.ask_of_past`."""
        await ask_of_past(self.membership, self.stage)


def announcement(
    context: Context, replica: Replica, state: State, since: float, may_serve: Collection[int] = ()
) -> Announcement:
    """The node's record; `since` is the wall clock at which it came to its stage."""
    counters = context.counters
    capacity = context.throughput.capacity(context.compute.duty.share)
    return Announcement(
        stage=context.stage,
        state=state,
        since=since,
        step=replica.step,
        round=replica.round,
        loss=finite(counters.losses.recent()),
        tokens_per_second=round(context.throughput.tokens_per_second(), 3),
        capacity=None if capacity is None else round(capacity, 6),
        may_serve=sorted(may_serve),
        addresses=context.transport.addresses()[:8],
        name=context.name,
        links=context.links.published(),
        through=list(context.transport.through()),
        beginning=replica.lineage.beginning,
        begun=replica.lineage.begun,
        protocol=PROTOCOL,
        minor=MINOR,
        features=list(FEATURES),
        program=own_version(),
    )


def use_of_device(context: Context, replica: Replica, rate: float) -> DeviceUse:
    """The use of the device at so many tokens per second."""
    return device_use(replica.device, OPERATIONS * work_of(context.manifest, context.stage) * rate)


def statistics(
    context: Context, replica: Replica, state: State, since: float, awaited: Awaited | None = None
) -> NodeStats:
    """The node's numbers for whoever asks; `since` is the elapsed time at which the node joined."""
    counters, now = context.counters, context.view.elapsed()
    rate, capacity = (
        context.throughput.tokens_per_second(now),
        context.throughput.capacity(context.compute.duty.share),
    )
    use = use_of_device(context, replica, rate)
    return NodeStats(
        stage=context.stage,
        state=state,
        step=replica.step,
        round=replica.round,
        loss=finite(counters.losses.recent()),
        tokens=counters.tokens,
        tokens_per_second=rate,
        pair_averagings=counters.partners.total,
        partners=counters.partners.largest(MOST_TOLD_PEERS),
        partner=counters.partner,
        spread=finite(counters.spread),
        expected_spread=finite(counters.expected_spread),
        gossip_bytes=counters.gossip_bytes,
        delivered=counters.sent.total,
        sent=counters.sent.largest(MOST_TOLD_PEERS),
        received=counters.received,
        queue=counters.queue,
        seconds_per_microbatch=None if capacity is None else round(1 / capacity, 6),
        resends=counters.resends,
        blocked_seconds=counters.blocked_seconds,
        uptime=now - since,
        compute_fraction=round(context.compute.busy.fraction(), 4),
        recent_compute_fraction=round(context.compute.busy.recent_fraction(), 4),
        data_wait_fraction=None if counters.data_wait is None else round(counters.data_wait, 6),
        links=context.links.told(),
        probe_breaches=counters.probe_breaches,
        device=use.name[:64],
        memory=use.memory,
        memory_of_device=use.of_memory,
        share_of_peak=None if use.share_of_peak is None else round(use.share_of_peak, 4),
        version=own_version(),
        trend=counters.losses.trend(),
        best=counters.losses.best(now, context.transport.now()),
        step_age=context.throughput.age(now),
        no_peer_seconds=0.0 if counters.no_peer_since is None else now - counters.no_peer_since,
        time=context.transport.now(),
        cannot_save=counters.cannot_save,
        passed_on=context.transport.passed_on,
        beginning=replica.lineage.beginning,
        begun=replica.lineage.begun if replica.lineage.beginning else None,
        awaited=awaited,
        apart=context.view.apart(context.stage, context.transport.now()),
    )


def history_point(context: Context) -> HistoryPoint:
    """A node's numbers in short, for those who begin to watch later."""
    counters, now = context.counters, context.view.elapsed()
    return HistoryPoint(
        time=round(context.transport.now(), 3),
        stage=context.stage,
        tokens=counters.tokens,
        tokens_per_second=round(context.throughput.tokens_per_second(now), 3),
        loss=finite(counters.losses.recent()),
        spread=finite(counters.spread),
        expected_spread=finite(counters.expected_spread),
    )
