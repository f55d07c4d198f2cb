"""A node that nobody can dial: who passes streams on to it, what happens when one leaves, and where others join."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bootstrap.creating.invitation import in_a_line
from bootstrap.creating.staying import addresses_to_join
from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.membership.ways_in import LACKING_EVERY, LOOKED_EVERY, RENEWED_EVERY, WAYS, WaysIn
from node.process.dashboard_process import own_addresses
from node.watch.events import Events
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages.peers import Hello, KeepWay, WayKept, Welcome
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc
from tests.unit.two_peers import in_virtual_time

HOME = "/ip4/192.168.1.2/tcp/4001"
OUTSIDE = "/ip4/9.9.1.1/tcp/4001"


class AtHome(MemoryTransport):
    """One peer in a home network. Mutable state: where its peers were dialled, and what it announces."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        super().__init__(network, identity)
        self.places = dict[PeerId, list[str]]()
        self.announced = [HOME]

    def addresses(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in self.announced]

    async def remotes(self) -> dict[PeerId, list[str]]:
        return dict(self.places)

    async def announce(self, addresses: Sequence[str]) -> None:
        self.announced = list(addresses)


@dataclass
class Home:
    """The node and its peers. Mutable state: which of them pass streams on, dial it, and what it was asked when."""

    node: AtHome
    ways: WaysIn
    peers: list[PeerId]
    willing: set[PeerId]
    reached: str = ""  # the address at which peers dial the node
    liars: dict[PeerId, str] = field(default_factory=dict)  # where they claim to have dialled it
    hellos: list[float] = field(default_factory=list)
    told: list[dict[str, object]] = field(default_factory=list)

    def events(self) -> list[object]:
        return [event["event"] for event in self.told]

    def place(self, number: int) -> str:
        peer = self.peers[number]
        return f"{self.node.places[peer][0]}/p2p/{peer}"

    def leave(self, number: int) -> None:
        self.willing.discard(self.peers[number])
        del self.node.places[self.peers[number]]


@asynccontextmanager
async def at_home(willing: Sequence[bool], places: Sequence[str] = ()) -> AsyncIterator[Home]:
    """A node with a peer for each of `willing`, that passes streams on or not, dialled at 8.8.N.1 unless named."""
    network = MemoryNetwork(0, Link(latency=0.01))
    node = AtHome(network, Identity.from_seed("at home"))
    await node.start()
    rpcs, told = [Rpc(node)], list[dict[str, object]]()
    peers = [Identity.from_seed("way", number).peer_id for number in range(len(willing))]
    kept = {peer for peer, does in zip(peers, willing, strict=True) if does}
    home = Home(node, WaysIn(rpcs[0], Events(node.now, told.append)), peers, kept, told=told)
    for number, peer in enumerate(peers):
        transport = MemoryTransport(network, Identity.from_seed("way", number))
        await transport.start()
        rpcs.append(Rpc(transport))
        node.places[peer] = [places[number] if places else f"/ip4/8.8.{number}.1/tcp/4001"]

        async def on_hello(request: Request[Hello], peer: PeerId = peer) -> Answer[Welcome]:
            home.hellos.append(asyncio.get_running_loop().time())
            reached = home.liars.get(peer, home.reached)
            return Answer(Welcome(run_id="0" * 16, time=0.0, role="node", manifest=b"", reached=reached))

        async def on_keep_way(request: Request[KeepWay], peer: PeerId = peer) -> Answer[WayKept]:
            if peer not in home.willing:
                raise Refused("passes-nothing-on", "")
            return Answer(WayKept(seconds=600.0))

        rpcs[-1].handle(Hello.answered_by(on_hello), KeepWay.answered_by(on_keep_way))
    for rpc in rpcs:
        await rpc.start()
    running = asyncio.create_task(home.ways.run())
    try:
        yield home
    finally:
        running.cancel()
        for rpc in rpcs:
            await rpc.close()
            await rpc.transport.close()


@in_virtual_time
async def test_a_hidden_node_names_the_addresses_of_its_ways_in_and_not_its_own() -> None:
    async with at_home([False, True, True]) as home:
        await home.ways.has_looked.wait()
        assert set(home.node.ways_in) == set(home.peers[1:])
        named = home.node.addresses_to_join()
        assert {*named[:WAYS]} == {home.place(1), home.place(2)}
        assert named[WAYS:] == [home.place(0)], "a member that passes nothing on can be joined through"
        assert home.events() == ["reached-through"]
        own = own_addresses(home.node, 4001)
        assert own == [f"/ip4/127.0.0.1/tcp/4001/p2p/{home.node.peer_id}", *named, *home.node.addresses()]


@in_virtual_time
async def test_peers_in_its_own_network_come_after_those_that_all_can_dial() -> None:
    places = ["/ip4/192.168.1.9/tcp/4001", "/ip4/127.0.0.1/tcp/4001", "/ip4/8.8.8.8/tcp/4001"]
    async with at_home([True, True, False], places) as home:
        await home.ways.has_looked.wait()
        assert home.node.addresses_to_join() == [home.place(2), home.place(0)]


@in_virtual_time
async def test_without_anybody_that_passes_on_others_join_through_the_members_that_it_knows() -> None:
    async with at_home([False]) as home:
        await home.ways.has_looked.wait()
        assert home.node.ways_in == ()
        assert home.node.through() == (home.node.peer_id,), "others are to know that dialling it is vain"
        assert home.node.addresses_to_join() == [home.place(0)]
        assert home.events() == ["not-reached"]


@in_virtual_time
async def test_a_node_that_can_be_dialled_names_itself() -> None:
    async with at_home([True]) as home:
        home.node.announced = [OUTSIDE]
        home.reached = OUTSIDE
        await home.ways.has_looked.wait()
        assert home.node.ways_in == home.node.through() == ()
        assert home.node.addresses_to_join() == home.node.addresses()


@in_virtual_time
async def test_a_way_that_is_lost_is_replaced_at_once_without_asking_again_who_can_dial() -> None:
    async with at_home([True, True, True]) as home:
        await home.ways.has_looked.wait()
        lost = home.peers.index(home.node.ways_in[0])
        kept, asked = home.node.ways_in[1], len(home.hellos)
        home.leave(lost)
        await asyncio.sleep(LOOKED_EVERY + 1.0)
        assert home.node.ways_in[0] == kept, "that which is there stays"
        assert set(home.node.ways_in) == set(home.peers) - {home.peers[lost]}
        assert len(home.hellos) == asked
        assert home.peers[lost] not in " ".join(home.node.addresses_to_join())
        assert home.events() == ["reached-through"] * 2


@in_virtual_time
async def test_a_second_way_is_looked_for_before_the_first_is_renewed() -> None:
    async with at_home([True, False]) as home:
        await home.ways.has_looked.wait()
        assert home.node.ways_in == (home.peers[0],)
        home.willing.add(home.peers[1])
        await asyncio.sleep(LACKING_EVERY + LOOKED_EVERY + 1.0)
        assert set(home.node.ways_in) == set(home.peers)


@in_virtual_time
async def test_a_node_that_has_lost_everybody_warns_of_nothing_that_it_does_not_know() -> None:
    async with at_home([True, True]) as home:
        await home.ways.has_looked.wait()
        home.leave(0)
        home.leave(1)
        await asyncio.sleep(LOOKED_EVERY + 1.0)
        assert home.node.ways_in == ()
        assert home.events() == ["reached-through"]
        assert home.node.addresses_to_join() == home.node.addresses()


@in_virtual_time
async def test_a_port_that_is_forwarded_later_is_announced_and_the_ways_in_are_given_up() -> None:
    async with at_home([True, True]) as home:
        await home.ways.has_looked.wait()
        assert home.node.ways_in
        home.reached = OUTSIDE
        await asyncio.sleep(RENEWED_EVERY + LOOKED_EVERY + 1.0)
        assert home.node.announced == [OUTSIDE]
        assert home.node.ways_in == ()
        assert home.node.addresses_to_join() == home.node.addresses()


@in_virtual_time
async def test_one_networks_claim_to_have_dialled_a_hidden_node_takes_no_way_in_from_it() -> None:
    """Failed before: the node gave up its ways in at the first such claim, and nobody reached it."""
    places = [f"/ip4/{network}.1/tcp/4001" for network in ("8.8.0", "8.8.1", "8.8.2", "9.9.9", "9.9.9")]
    async with at_home([True] * 5, places) as home:
        home.liars = dict.fromkeys(home.peers[3:], OUTSIDE)
        await home.ways.has_looked.wait()
        for _ in range(20):  # each time others are asked, the liars alone as well
            assert home.node.is_hidden
            assert len(home.node.ways_in) == WAYS
            await asyncio.sleep(RENEWED_EVERY + LOOKED_EVERY + 1.0)


@in_virtual_time
async def test_two_networks_that_have_dialled_a_node_are_believed() -> None:
    async with at_home([True] * 5) as home:
        home.liars = dict.fromkeys(home.peers[3:], OUTSIDE)
        await home.ways.has_looked.wait()
        await asyncio.sleep(20 * RENEWED_EVERY)
        assert not home.node.is_hidden
        assert home.node.ways_in == ()


@in_virtual_time
async def test_a_seed_peer_at_home_invites_to_the_members_that_it_has_dialled() -> None:
    places = ["/ip4/192.168.1.9/tcp/4001", "/ip4/8.8.8.8/tcp/4001"]
    async with at_home([False, False], places) as home:
        addresses = await addresses_to_join(home.node)
        assert addresses == [*home.node.addresses(), home.place(1)]
        assert in_a_line(addresses) == f"noloco join {home.place(1)}"
        home.node.announced = [OUTSIDE]
        assert await addresses_to_join(home.node) == home.node.addresses()


@in_virtual_time
async def test_hidden_peers_that_are_met_directly_are_told_once_and_their_loss_is_an_event() -> None:
    async with at_home([True]) as home:
        await home.ways.has_looked.wait()
        home.node.met_directly = frozenset(home.peers)
        await asyncio.sleep(3 * LOOKED_EVERY)
        assert home.events() == ["reached-through", "met-directly"]
        assert home.told[-1]["peers"] == home.peers
        home.node.met_directly = frozenset()
        await asyncio.sleep(2 * LOOKED_EVERY)
        assert "no-longer-direct" in home.events()


@in_virtual_time
async def test_a_hidden_peer_that_was_met_is_neither_a_way_in_nor_an_address_to_join_at() -> None:
    async with at_home([True, True]) as home:
        home.node.met_directly = frozenset(home.peers[:1])
        await home.ways.has_looked.wait()
        assert home.node.ways_in == (home.peers[1],)
        assert home.node.addresses_to_join() == [home.place(1)]
