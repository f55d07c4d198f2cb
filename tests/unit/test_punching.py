"""Two peers behind routers arrange a direct connection: who sends what to where, and what a liar can have them do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from protocol.access.peer_limits import Allowance
from protocol.errors import PeerUnreachable
from protocol.ground import PeerId
from protocol.records.addresses import Whereabouts, host_of
from protocol.records.identity import Identity
from protocol.transport.dialling import FIRST_MEETING, LONGEST_DIRECT, Dials
from protocol.transport.libp2p import Libp2pTransport
from protocol.transport.punching import (
    ASKED_OFTEN,
    MET_OFTEN,
    MOST_SEEN,
    PUNCH,
    SEEN_AT,
    STAYS,
    Around,
    Punching,
    read_addresses,
)
from protocol.transport.relayed_stream import read_frame, write_frame
from tests.unit.two_peers import in_virtual_time

NEAR, FAR = "/ip4/9.9.1.1/tcp/4001", "/ip4/9.9.2.1/tcp/4002"
AT_HOME = Whereabouts(frozenset(filter(None, [host_of("/ip4/192.168.1.2/tcp/4001")])), False)
PEER = Identity.from_seed("somebody").peer_id
FOREIGN = (  # what neither a record nor a frame may have this machine dial
    "/ip4/8.8.8.8/udp/4001/quic-v1",
    "/ip4/8.8.8.8/udp/4001/quic",
    "/ip4/8.8.8.8/udp/4001",
    "/ip4/8.8.8.8/tcp/4001/quic-v1",
    "/ip4/8.8.8.8/quic-v1/4001",
    "/ip4/8.8.8.8/tcp/4001/ws",
    "/ip6/2606:4700::1111/udp/4001/quic-v1/webtransport",
    "/dns4/example.com/udp/4001/quic-v1",
    "/dns4/example.com/tcp/4001",
    f"/ip4/8.8.8.8/udp/4001/quic-v1/p2p/{PEER}/p2p-circuit",
    "/ip4/127.0.0.1/tcp/4001",
    "/ip4/10.0.0.1/tcp/4001",
    "/ip4/8.8.8.8/tcp/22",
    "/ip4/224.0.0.1/tcp/4001",
    "",
)


@dataclass
class Peer:
    """A peer behind a router. Mutable state: what it did, in order, and what it is seen at by the observer."""

    transport: MemoryTransport
    observers: list[PeerId] = field(default_factory=list)
    remotes: dict[PeerId, list[str]] = field(default_factory=dict)
    did: list[tuple[str, str]] = field(default_factory=list)
    dials: Dials = field(default_factory=Dials)
    here: Whereabouts = AT_HOME
    port: int = 0
    begins_from: int = 0  # another port than it listens on

    async def begin(self) -> None:
        async def remotes() -> dict[PeerId, list[str]]:
            return self.remotes

        async def dial(peer: PeerId, addresses: list[str], deadline: float) -> bool:
            self.did += [("dial", address) for address in addresses]
            return True

        def begin(address: str) -> int:
            self.did.append(("begin", address))
            return self.begins_from or self.port

        def take(peer: PeerId, addresses: Sequence[str]) -> list[str]:
            return self.dials.take_named(peer, [f"{one}/p2p/{peer}" for one in addresses], self.here, 0.0)

        around = Around(
            lambda: self.observers,
            lambda: self.port,
            self.transport.open,
            self.transport.open,
            remotes,
            take,
            dial,
            begin,
        )
        self.punching = Punching(around)
        await self.transport.start()
        await self.transport.serve(SEEN_AT, self.punching.on_seen_at)
        await self.transport.serve(PUNCH, self.punching.on_punch)

    def forget(self) -> None:
        """Begin with nothing done, and all allowances whole."""
        self.did.clear()
        self.dials = Dials()
        self.punching._answers, self.punching._meetings = Allowance(*ASKED_OFTEN), Allowance(*MET_OFTEN)
        self.punching._seen = []

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id


async def asked(asker: Peer, other: Peer, named: list[str]) -> list[str]:
    """Ask another peer to meet at these addresses; return those that it answers with."""
    stream = await asker.transport.open(other.peer_id, PUNCH, 5.0)
    try:
        await write_frame(stream, msgpack.packb(named))
        return read_addresses(await read_frame(stream, 256), other.peer_id)
    finally:
        stream.close()


@asynccontextmanager
async def two_homes() -> AsyncIterator[tuple[Peer, Peer, Peer]]:
    """Two hidden peers and the one between them, which sees them at `NEAR` and `FAR`."""
    network = MemoryNetwork(0, Link(latency=0.01))
    near, between, far = (
        Peer(MemoryTransport(network, Identity.from_seed("punching", name))) for name in range(3)
    )
    for peer in (near, between, far):
        await peer.begin()
    near.port, far.port = 4001, 4002
    near.observers = far.observers = [between.peer_id]
    between.remotes = {near.peer_id: [NEAR], far.peer_id: [FAR]}
    try:
        yield near, between, far
    finally:
        for peer in (near, between, far):
            await peer.transport.close()


@in_virtual_time
async def test_the_other_end_begins_a_connection_to_where_this_one_is_seen_before_this_one_dials() -> None:
    async with two_homes() as (near, _, far):
        assert await near.punching.meet(far.peer_id)
        assert far.did == [("begin", f"{NEAR}/p2p/{near.peer_id}")]
        assert near.did == [("dial", f"{FAR}/p2p/{far.peer_id}")]


@in_virtual_time
async def test_the_port_that_a_peer_listens_on_is_tried_beside_the_one_that_is_seen() -> None:
    async with two_homes() as (near, between, far):
        between.remotes[far.peer_id] = [FAR.replace("4002", "50000")]
        await near.punching.meet(far.peer_id)
        assert [address.split("/")[4] for _, address in near.did] == ["4002", "50000"]


@in_virtual_time
async def test_a_connection_that_begins_at_another_port_is_dialled_there_first() -> None:
    """Two ports that were connected a moment ago rest for a minute; most routers keep a port outside."""
    async with two_homes() as (near, _, far):
        far.begins_from = 50_123
        await near.punching.meet(far.peer_id)
        assert [address.split("/")[4] for _, address in near.did] == ["50123", "4002"]


@in_virtual_time
async def test_who_does_not_know_where_it_is_seen_neither_asks_nor_sends() -> None:
    async with two_homes() as (near, between, far):
        for seen in ([], ["/ip4/192.168.1.2/tcp/4001"], ["/ip4/8.8.8.8/udp/4001/quic-v1"]):
            between.remotes[near.peer_id] = seen
            assert not await near.punching.meet(far.peer_id)
        assert far.did == []
        between.remotes = {near.peer_id: [NEAR], far.peer_id: []}
        assert not await near.punching.meet(far.peer_id)
        far.observers = []
        assert not await near.punching.meet(far.peer_id)
        assert far.did == near.did == []


@in_virtual_time
async def test_a_peer_that_is_gone_is_not_met_and_nothing_is_raised() -> None:
    async with two_homes() as (near, between, far):
        await far.transport.close()
        assert not await near.punching.meet(far.peer_id)
        await between.transport.close()
        assert await near.punching.seen_by(near.observers) == []


@in_virtual_time
async def test_neither_end_has_the_other_dial_what_a_record_could_not() -> None:
    async with two_homes() as (near, between, far):
        for foreign in FOREIGN:
            for peer in (near, between, far):
                peer.forget()
            between.remotes[far.peer_id] = [foreign]
            await near.punching.meet(far.peer_id)
        assert near.did == []
        between.remotes[far.peer_id] = [FAR]
        for foreign in (*FOREIGN, NEAR):  # an asker that lies about where it is seen, and one that does not
            for peer in (near, between, far):
                peer.forget()
            assert await asked(near, far, [foreign]) == [FAR]
        assert far.did == [("begin", f"{NEAR}/p2p/{near.peer_id}")]


@in_virtual_time
async def test_connections_begun_are_as_few_as_dials_on_the_word_of_others() -> None:
    async with two_homes() as (near, between, far):
        for _ in range(20):
            await near.punching.meet(far.peer_id)
            for peer in (near, between, far):  # what bounds meetings and answers is not looked at here
                peer.punching._answers, peer.punching._meetings = (
                    Allowance(*ASKED_OFTEN),
                    Allowance(*MET_OFTEN),
                )
        assert len(far.did) == 8


@in_virtual_time
async def test_who_asks_again_and_again_to_meet_has_nobody_asked_for_it() -> None:
    async with two_homes() as (near, between, far):
        between.punching._answers = Allowance((1_000, 1.0), (1_000, 1.0))
        for _ in range(20):
            with suppress(PeerUnreachable):
                await asked(near, far, [NEAR])
        left = between.punching._answers
        assert sum(left.take(far.peer_id, 1, 0.0) for _ in range(1_001)) >= 990


@in_virtual_time
async def test_a_place_of_the_own_network_is_nothing_to_begin_with() -> None:
    async with two_homes() as (near, _, far):
        for place in ("/ip4/192.168.1.1/tcp/8080", "/ip4/127.0.0.1/tcp/4001", f" {NEAR}"):
            far.here = Whereabouts(AT_HOME.hosts, is_local=True)
            assert await asked(near, far, [place]) == [FAR]
        assert far.did == []


@in_virtual_time
async def test_how_often_a_peer_is_told_where_it_is_seen_is_bounded() -> None:
    async with two_homes() as (near, _, _):
        told = [bool(await near.punching.seen_by(near.observers)) for _ in range(20)]
        assert told == [True] * ASKED_OFTEN[0][0] + [False] * (20 - ASKED_OFTEN[0][0])


@in_virtual_time
async def test_one_answer_serves_meetings_with_many_peers_and_is_asked_for_again_later() -> None:
    async with two_homes() as (near, between, _):
        for _ in range(20):
            assert await near.punching.seen_at() == [NEAR]
        between.remotes[near.peer_id] = [FAR]
        await asyncio.sleep(STAYS)
        assert await near.punching.seen_at() == [FAR.replace("4002", "4001"), FAR]


@in_virtual_time
async def test_a_peer_that_names_where_this_one_is_seen_has_it_connect_to_nobody() -> None:
    async with two_homes() as (near, between, far):
        assert await asked(near, far, [FAR]) == [FAR]
        assert far.did == []
        between.remotes[far.peer_id] = [NEAR]
        far.forget()
        await near.punching.meet(far.peer_id)
        assert ("dial", f"{NEAR}/p2p/{far.peer_id}") not in near.did


@in_virtual_time
async def test_a_peer_with_several_connections_is_one_observer() -> None:
    async with two_homes() as (near, between, _):
        between.remotes[near.peer_id] = [NEAR, NEAR.replace("4001", "50000")]
        assert await near.punching.seen_by([between.peer_id]) == [NEAR]


@pytest.mark.parametrize(
    "found", [b"", b"\xc1", msgpack.packb("x"), msgpack.packb({"a": 1}), msgpack.packb(7)]
)
def test_what_is_no_list_ends_the_stream(found: bytes) -> None:
    with pytest.raises(PeerUnreachable, match="no addresses"):
        read_addresses(found, PEER)


def test_of_a_list_the_first_usable_addresses_count() -> None:
    assert read_addresses(msgpack.packb([None, NEAR]), PEER) == [NEAR]
    assert read_addresses(msgpack.packb([NEAR] * 50), PEER) == [NEAR] * MOST_SEEN
    assert read_addresses(msgpack.packb([b"\xff", [NEAR], 3.0]), PEER) == []


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_record_with_such_an_address_in_any_place_has_nobody_dial_it(foreign: str) -> None:
    good = f"{FAR}/p2p/{PEER}"
    for place in range(3):
        for written in (foreign, f"{foreign}/p2p/{PEER}"):
            dials, addresses = Dials(), [good, good]
            addresses.insert(place, written)
            dials.learn(PEER, addresses)
            assert dials.take(PEER, AT_HOME, 0.0) == [good, good]


def test_a_meeting_that_comes_to_nothing_is_tried_ever_more_rarely() -> None:
    dials, now, tried = Dials(), 0.0, []
    while now < 3_600:
        if dials.take_meeting(PEER, now):
            tried.append(now)
        now += 3.0
    pauses = [later - before for before, later in pairwise(tried)]
    assert pauses[0] == pytest.approx(FIRST_MEETING, abs=3.0)
    assert max(pauses) == pytest.approx(LONGEST_DIRECT, abs=3.0)
    dials.succeeded(PEER)
    assert dials.take_meeting(PEER, now)


class Between:
    """A session of p2pd in which some peers are connected. Mutable state: those, and what was dialled."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.places: dict[PeerId, list[str]] = {}

    async def remotes(self) -> dict[PeerId, list[str]]:
        return self.places


@dataclass
class Meetings:
    """What a transport arranges. Mutable state: the peers that it was to meet."""

    met: list[PeerId] = field(default_factory=list)

    async def meet(self, peer: PeerId) -> bool:
        self.met.append(peer)
        return True


async def test_of_two_hidden_peers_the_one_with_the_smaller_id_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []
    for name, other in ((0, 1), (1, 0)):
        Identity.from_seed("begins", name).save(tmp_path / str(name))
        transport, session, meetings = Libp2pTransport(tmp_path / str(name)), Between(), Meetings()
        peer = Identity.from_seed("begins", other).peer_id
        monkeypatch.setattr(transport, "_punching", meetings)
        monkeypatch.setattr(transport._thirds, "relayed", lambda peer=peer: [peer])
        transport.learn_ways(peer, [PEER])
        await transport._leave_ways(session)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert meetings.met == [], "it can be dialled itself"
        transport.is_hidden = True
        await transport._leave_ways(session)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        began += meetings.met
        assert (transport.relayed, transport.met_directly) == ({peer}, frozenset())
        session.places[peer] = [FAR]
        await transport._leave_ways(session)  # type: ignore[arg-type]
        assert (transport.relayed, transport.met_directly) == (frozenset(), {peer})
        assert meetings.met == began[-1:] or meetings.met == []
    assert began == [max(Identity.from_seed("begins", name).peer_id for name in (0, 1))]
