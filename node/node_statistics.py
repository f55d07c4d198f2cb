"""What others see of a node: its record in the DHT, and its numbers for whoever asks."""

from __future__ import annotations

from collections.abc import Collection

from node.context import Context
from node.model.replica import Replica
from node.watch.events import finite
from protocol.announcement import Announcement, State
from protocol.messages.peers import MOST_TOLD_PEERS, NodeStats


def announcement(
    context: Context, replica: Replica, state: State, since: float, may_serve: Collection[int] = ()
) -> Announcement:
    """The node's record; `since` is the wall clock at which it came to its stage."""
    counters = context.counters
    capacity = context.throughput.capacity()
    return Announcement(
        stage=context.stage,
        state=state,
        since=since,
        step=replica.step,
        round=replica.round,
        loss=finite(counters.loss),
        tokens_per_second=round(context.throughput.tokens_per_second(), 3),
        capacity=None if capacity is None else round(capacity, 6),
        may_serve=sorted(may_serve),
        addresses=context.transport.addresses()[:8],
        links=context.links.published(),
    )


def statistics(context: Context, replica: Replica, state: State, since: float) -> NodeStats:
    """For whoever asks; `since` is the elapsed time at which the node joined."""
    counters = context.counters
    capacity = context.throughput.capacity()
    return NodeStats(
        stage=context.stage,
        state=state,
        step=replica.step,
        round=replica.round,
        loss=finite(counters.loss),
        tokens=counters.tokens,
        tokens_per_second=context.throughput.tokens_per_second(),
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
        uptime=context.view.elapsed() - since,
        compute_fraction=round(context.compute.busy.fraction(), 4),
        recent_compute_fraction=round(context.compute.busy.recent_fraction(), 4),
        data_wait_fraction=None if counters.data_wait is None else round(counters.data_wait, 6),
        links=context.links.told(),
        probe_breaches=counters.probe_breaches,
    )
