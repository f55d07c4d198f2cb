"""What it costs to know others, in a swarm of 100 to 20,000: the records of one stage, held by ten real p2pd.

Signed records of so many replicas that do not exist are laid where the DHT would keep them. A member then looks and
announces itself as a node does. Counted: bytes of all requests and answers of the DHT, time and processor time (of
this process and all p2pd). Ratios are of the largest number of records by the smallest: `bytes_of_a_look`,
`seconds_of_a_look`, `processor_of_a_look`, `bytes_of_an_announcement`; `found` is the share of records that somebody
who reads all buckets finds, and `bytes_of_one_key` what a look took while a stage was one key.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop
from reporting.report import Report, arguments_of, parser_of, run

from node.membership.buckets import StageSize, level_of
from node.membership.discovery import read_stage
from node.membership.view import View
from protocol.errors import UserError
from protocol.records.announcement import (
    Announcement,
    LinkReport,
    bucket_key,
    is_sampled,
    record_key,
    stage_key,
)
from protocol.records.identity import Identity
from protocol.records.records import key_digest, seal_record
from protocol.transport.dht_guard import GuardedProtocol, Serializer
from protocol.transport.hivemind_api import DHTID, P2PContext, dht_pb2
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

PEERS = 10
REPLICAS_OF_A_KEY = 5  # hivemind's default
LIFETIME = 3_000.0
DEADLINE = 20.0
TURNS_PER_MINUTE, ANNOUNCEMENTS_PER_MINUTE = 8, 4  # at a record's lifetime of 45 s

moved = Counter[str]()  # bytes of requests and answers, by kind


@dataclass
class Cost:
    """Of one look, medians; bytes of an announcement; per member and minute both together."""

    members: int
    level: int
    look_bytes: float
    look_seconds: float
    look_processor: float
    announce_bytes: float
    bytes_per_minute: float
    known: int
    found: float


class CountingProtocol(GuardedProtocol):
    """Counts what its node answers, which is what others move."""

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        answer = await super().rpc_find(request, context)
        moved["find"] += request.ByteSize() + answer.ByteSize()
        return answer

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        answer = await super().rpc_store(request, context)
        moved["store"] += request.ByteSize() + answer.ByteSize()
        return answer


def processor_seconds() -> float:
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))


class Swarm:
    """Mutable state: ten peers and what they hold; until the end of the `async with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closing = AsyncExitStack()
        self.peers: list[Libp2pTransport] = []

    async def __aenter__(self) -> Swarm:
        for number in range(PEERS):
            key = self._folder / f"{number}.key"
            Identity.generate().save(key)
            peer = Libp2pTransport(key, Libp2pConfig(host="127.0.0.1", nat_port_map=False))
            await peer.start()
            self._closing.push_async_callback(peer.close)
            if self.peers:
                await peer.connect(self.peers[0].addresses(), DEADLINE)
            self.peers.append(peer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    def hold(self, key: str, peer: str, sealed: bytes, expires: float) -> None:
        """As if `peer` had put it: at those whose node ids are nearest."""
        wanted, packed = DHTID.from_bytes(key_digest(key)), Serializer.dumps(sealed)
        nodes = [transport._session.dht._node for transport in self.peers if transport._session is not None]
        for node in sorted(nodes, key=lambda node: wanted.xor_distance(node.node_id))[:REPLICAS_OF_A_KEY]:
            if not node.protocol.storage.store_subkey(wanted, peer, packed, expires):
                raise UserError("A record was not kept.")


def announcement(level: int) -> bytes:
    """As large as that of a node that trains."""
    rng = random.Random(1)
    links = [
        LinkReport("".join(rng.choices("abcdefgh", k=16)), rng.random(), rng.random() * 1e7, 0.25)
        for _ in range(8)
    ]
    return Announcement(
        stage=0, state="serving", since=time.time(), step=1_000, round=40, loss=2.5, tokens_per_second=1e4,
        capacity=3.5, may_serve=[0, 1, 2, 3], addresses=["/ip4/203.0.113.7/tcp/31337/p2p/" + "1" * 52] * 2,
        links=links, level=level,
    ).to_bytes()  # fmt: skip


def fill(swarm: Swarm, run_id: str, identities: list[Identity], level: int) -> None:
    value, expires = announcement(level), time.time() + LIFETIME
    for identity in identities:
        me = identity.peer_id
        keys = {record_key(run_id, 0, me, level)} | (
            {stage_key(run_id, 0)} if is_sampled(me, level) else set()
        )
        for key in keys:
            swarm.hold(key, me, seal_record(identity, key, value, expires), expires)


async def cost_of(swarm: Swarm, identities: list[Identity], level: int, looks: int) -> Cost:
    run_id, members = f"{len(identities)}-{level}", len(identities)
    turns = StageSize(members, level, {level: members}).every
    fill(swarm, run_id, identities, level)
    reader, view = swarm.peers[-1], View()
    seconds, processor, nbytes = [], [], []
    for _ in range(looks):
        # records are renewed meanwhile
        reader._session.dht._node.protocol.record_validator._authenticate.cache_clear()
        began, used, before = time.perf_counter(), processor_seconds(), moved.total()
        await read_stage(reader, run_id, 0, view)
        seconds.append(time.perf_counter() - began)
        processor.append(processor_seconds() - used)
        nbytes.append(moved.total() - before)
    announced = []
    for _ in range(looks):
        before = moved.total()
        await reader.put(
            record_key(run_id, 0, reader.peer_id, level), announcement(level), LIFETIME, DEADLINE
        )
        announced.append(moved.total() - before)
    found = set[str]()
    for bucket in range(2**level):
        found |= {
            record.subkey for record in await reader.get(bucket_key(run_id, 0, level, bucket), DEADLINE)
        }
    look, announce = sum(nbytes) / looks, sum(announced) / looks
    minute = TURNS_PER_MINUTE / turns * look + ANNOUNCEMENTS_PER_MINUTE * announce
    known = len(view.members(0, reader.now()))
    share = len(found & {identity.peer_id for identity in identities}) / members
    return Cost(
        members, level, round(look), round(median(seconds), 4), round(sum(processor) / looks, 4), round(announce),
        round(minute), known, round(share, 4),
    )  # fmt: skip


async def measure(sizes: list[int], looks: int, report: Report) -> tuple[list[Cost], Cost]:
    from protocol.transport.hivemind_api import hivemind_node

    hivemind_node.DHTProtocol = CountingProtocol
    report.tell(f"Making {max(sizes):,} identities.")
    identities = [Identity.generate() for _ in range(max(sizes))]
    costs = []
    with tempfile.TemporaryDirectory(prefix="discovery-") as folder:
        async with Swarm(Path(folder)) as swarm:
            for size in sizes:
                costs.append(await cost_of(swarm, identities[:size], level_of(size, 0), looks))
                report.tell_row(asdict(costs[-1]))
            one_key = await cost_of(swarm, identities[: min(1_000, max(sizes))], 0, 2)
            report.tell("All under one key, as it was:")
            report.tell_row(asdict(one_key))
    return costs, one_key


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--members", default="100,1000,5000,20000", help="how many records, with commas between"
    )
    parser.add_argument("--looks", type=int, default=24)
    arguments = arguments_of(parser, members="100,400", looks=8)
    report = Report("discovery", arguments.json)
    sizes = [int(size) for size in arguments.members.split(",")]
    costs, one_key = uvloop.run(measure(sizes, arguments.looks, report))
    first, last = costs[0], costs[-1]
    ratios: dict[str, Any] = {
        "bytes_of_a_look": last.look_bytes / first.look_bytes,
        "seconds_of_a_look": last.look_seconds / first.look_seconds,
        "processor_of_a_look": last.look_processor / first.look_processor,
        "bytes_of_an_announcement": last.announce_bytes / first.announce_bytes,
        "bytes_per_minute": last.bytes_per_minute / first.bytes_per_minute,
        "found": min(cost.found for cost in costs),
        "bytes_of_one_key": one_key.look_bytes / first.look_bytes,
    }
    report.conclude(
        {name: round(value, 3) for name, value in ratios.items()}, [asdict(cost) for cost in costs]
    )


if __name__ == "__main__":
    run(main, UserError)
