"""What a node counts by peer stays bounded, and so does what it tells of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import msgpack
import torch

from node.context import Context, Counters, Throughput, statistics
from node.links.links import Links
from node.machine.duty import Duty
from node.membership.view import View
from node.model.replica import Replica
from node.watch.counting import MAX_COUNTED, Tally
from protocol.ground import PeerId
from protocol.messages.peers import MOST_TOLD_PEERS, NodeStats
from protocol.records.identity import Identity
from protocol.records.lineage import UNDATED
from protocol.rpc.frames import MAX_HEADER_BYTES
from tests.swarm.micro import micro_manifest

PEERS = [Identity.from_seed("met", number).peer_id for number in range(5_000)]


def test_the_least_make_room_and_nothing_is_lost_of_the_sum() -> None:
    tally = Tally()
    for peer in PEERS:
        for _ in range(3 if peer in PEERS[:10] else 1):
            tally.note(peer)
    assert len(tally) == MAX_COUNTED
    assert tally.total == 5_020
    assert tally.largest(10) == dict.fromkeys(sorted(PEERS[:10]), 3)


async def test_the_numbers_of_a_node_that_met_thousands_of_peers_can_be_read() -> None:
    """They broke the bound on a message's fields, and the honest node got a strike from whoever asked."""
    counters = Counters()
    for peer in PEERS:
        counters.sent.note(PeerId(peer))
        counters.partners.note(PeerId(peer))
    busy = SimpleNamespace(fraction=lambda: 0.5, recent_fraction=lambda: 0.5)
    context = SimpleNamespace(
        counters=counters,
        throughput=Throughput(),
        stage=0,
        manifest=micro_manifest(),
        links=Links(),
        compute=SimpleNamespace(busy=busy, duty=Duty()),
        transport=SimpleNamespace(now=lambda: 1.7e9, passed_on=0),
        view=View(),
    )
    replica = SimpleNamespace(step=7, round=1, device=torch.device("cpu"), lineage=UNDATED)
    since = asyncio.get_running_loop().time()
    stats = statistics(cast(Context, context), cast(Replica, replica), "serving", since)
    packed = msgpack.packb(stats.model_dump())
    assert len(packed) < MAX_HEADER_BYTES
    told = NodeStats.parsed(msgpack.unpackb(packed, max_map_len=4_096))
    assert told == stats
    assert (stats.delivered, stats.pair_averagings) == (5_000, 5_000)
    assert len(stats.sent) == len(stats.partners) == MOST_TOLD_PEERS
