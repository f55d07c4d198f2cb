"""Fifty identities of one network sit on a stage's DHT key, eight honest members elsewhere: real p2pd, loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.links.links import Links
from node.membership.discovery import Discovery, read_stage
from node.membership.hearsay import hear_from_several, serve_records
from node.membership.membership import Membership
from node.membership.past import Past
from node.membership.view import View
from node.pipeline.routing import Router
from node.watch.events import Events
from protocol.ground import PeerId
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from protocol.records.records import key_digest
from protocol.rpc.rpc import Rpc
from protocol.supervision import Supervisor
from protocol.transport.dht_guard import GuardedProtocol, node_id_of
from protocol.transport.hivemind_api import P2PContext, PeerID, dht_pb2
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from tests.real.test_libp2p_transport import OnLoopback
from tests.transport_network import DEADLINE
from tests.unit.test_routing import sending

HONEST, SYBILS, JOINS = 8, 50, 12
CANDIDATES = 5_000  # keys that were made to find so many near the stage's
LIFETIME = 30.0
RUN = "eclipse"
KEY = stage_key(RUN, 0)


def ground_names() -> list[str]:
    """Those of many identities whose node ids lie nearest to the stage's key."""
    wanted = int.from_bytes(key_digest(KEY), "big")

    def distance(name: str) -> int:
        peer = Identity.from_seed("suite", name).peer_id
        return wanted ^ int.from_bytes(node_id_of(PeerID.from_base58(peer)).to_bytes(), "big")

    return sorted((f"sybil {number}" for number in range(CANDIDATES)), key=distance)[:SYBILS]


def announcement_of(transport: Libp2pTransport) -> Announcement:
    return Announcement(stage=0, state="serving", since=0.0, addresses=transport.addresses()[:8])


class Honest:
    """A member without a model: it announces itself, reads the others' records and answers those who ask."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self.transport, self.supervisor, self.rpc = transport, Supervisor(), Rpc(transport)
        self.view = View()
        limits = SimpleNamespace(record_lifetime=LIFETIME)
        signed: Any = SimpleNamespace(run_id=RUN, manifest=SimpleNamespace(stages=1, limits=limits))
        events = Events(transport.now, lambda event: None)
        past = Past(RUN, lambda _: 1, LIFETIME, transport.now)
        self.membership = Membership(self.rpc, signed, self.view, Links(), events, self.supervisor, past)
        self.discovery = Discovery(self.membership, None, [0], 0, lambda: announcement_of(transport))

    async def start(self) -> None:
        await self.rpc.start()
        serve_records(self.rpc, self.membership.signed, self.view, None)

    def live(self) -> None:
        self.supervisor.keep("discovery", self.discovery.run, "It is lost.")

    async def close(self) -> None:
        await self.supervisor.close()
        await self.rpc.close()


def eclipse(transport: Libp2pTransport, friends: frozenset[str]) -> None:
    """From now on it keeps records of its friends alone, and names nobody else as a neighbour."""
    assert transport._session is not None
    protocol = cast(Any, transport._session.dht._node.protocol)

    class Eclipsing(GuardedProtocol):
        async def rpc_store(
            self, request: dht_pb2.StoreRequest, context: P2PContext
        ) -> dht_pb2.StoreResponse:
            if context.remote_id.to_base58() in friends:
                return await super().rpc_store(request, context)
            return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

        async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
            answer = await super().rpc_find(request, context)
            for result in answer.results:
                near = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=True)
                kept = [pair for pair in near if PeerID(pair[1]).to_base58() in friends]
                del result.nearest_node_ids[:], result.nearest_peer_ids[:]
                result.nearest_node_ids.extend(node for node, _ in kept)
                result.nearest_peer_ids.extend(peer for _, peer in kept)
            return answer

    protocol.__class__ = Eclipsing


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[OnLoopback]:
    network = OnLoopback(tmp_path)
    yield network
    await network.close()


async def begin_eclipse(network: OnLoopback, entry: list[str]) -> frozenset[str]:
    names = ground_names()
    sybils = [await network.peer(name, Libp2pConfig(host="127.66.0.1")) for name in names]
    friends = frozenset(sybil.peer_id for sybil in sybils)
    for sybil in sybils:
        await sybil.connect([*entry, *sybils[0].addresses()], DEADLINE)
        eclipse(sybil, friends)
    for sybil in sybils:
        await sybil.put(KEY, announcement_of(sybil).to_bytes(), 600, DEADLINE)
    return friends


async def known_soon(view: View, honest: set[PeerId]) -> int:
    """How many of these it knows, within two lifetimes: all of them are in one busy process here."""
    for _ in range(int(2 * LIFETIME)):
        if len(honest & set(view.peers())) >= 0.8 * len(honest):
            break
        await asyncio.sleep(1.0)
    return len(honest & set(view.peers()))


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_newcomers_find_honest_members_and_these_keep_each_other(network: OnLoopback) -> None:
    """Whatever the DHT shows: while members are in each other's routing tables their records are found there, too."""
    transports = [
        await network.peer(f"honest {n}", Libp2pConfig(host=f"127.{n + 10}.0.1")) for n in range(HONEST)
    ]
    members = [Honest(transport) for transport in transports]
    entry = transports[0].addresses()
    for member in members:
        await member.start()
        if member is not members[0]:
            assert await member.transport.connect(entry, DEADLINE)
        member.live()
    honest = {member.transport.peer_id for member in members}
    friends = await begin_eclipse(network, [a for t in transports[:3] for a in t.addresses()])
    await asyncio.sleep(LIFETIME)
    in_dht = {record.subkey for record in await transports[1].get(KEY, DEADLINE)}
    print(f"in the DHT {len(in_dht & honest)} of {HONEST} honest ones, {len(in_dht & friends)} sybils")

    rng, found = random.Random(1), list[int]()
    for number in range(JOINS):
        newcomer = Honest(
            await network.peer(f"newcomer {number}", Libp2pConfig(host=f"127.{number + 100}.0.1"))
        )
        await newcomer.start()
        assert await newcomer.transport.connect(rng.choice(transports).addresses(), DEADLINE)
        await read_stage(newcomer.transport, RUN, 0, newcomer.view)
        await hear_from_several(newcomer.membership)
        found.append(len(honest & set(newcomer.view.peers())))
        await newcomer.close()
        await newcomer.transport.close()
        network.transports.remove(newcomer.transport)
    print(f"newcomers found {min(found)} to {max(found)} of {HONEST} honest members, median {median(found)}")
    assert min(found) >= HONEST // 2

    for member in members:
        view, me = member.view, member.transport.peer_id
        known = await known_soon(view, honest - {me})
        assert known >= 0.8 * (HONEST - 1), f"{me[-8:]} knows {known} honest ones"
        router = Router(random.Random(2), view.shares)
        serving = [p for p in view.serving(0, member.transport.now()) if p != me]
        got = sending(
            router, serving, 1_000, lambda peer: 1.0
        )  # quicker ones get two fair shares, of nine here
        share = sum(got[peer] for peer in honest) / got.total()
        group_of = view.shares(serving).group_of
        theirs = {group for peer, group in group_of.items() if peer not in honest}
        print(
            f"{me[-8:]} sends {share:.2f} to honest ones, of {len(serving)} that it knows, sybils of {theirs}"
        )
        # a connection of theirs that took no port of their own comes from 127.0.0.1, which is another network here
        assert len(theirs) <= 2
        assert share >= 0.95 * (1 - len(theirs) / len(set(group_of.values())))
        await member.close()
