"""Addresses that others name: nobody makes this node knock at doors that are no swarm's, nor at many in a minute."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from tests.real.test_libp2p_transport import OnLoopback
from tests.transport_network import ECHO

NAMED = 8  # addresses in a record
OUTSIDE = "/ip4/198.18.0.1/tcp/"  # any that is not loopback: a node that others reach from elsewhere


class Doors:
    """Ports of this machine that have nothing to do with a swarm. Mutable state: how often each was knocked at."""

    def __init__(self) -> None:
        self.knocks = 0
        self._servers: list[asyncio.Server] = []

    async def open(self) -> list[str]:
        """As many as a record may name."""
        self._servers = [await asyncio.start_server(self._knock, "127.0.0.1", 0) for _ in range(NAMED)]
        return [f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}" for server in self._servers]

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        writer.close()


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[OnLoopback]:
    network = OnLoopback(tmp_path)
    yield network
    await network.close()


@pytest.fixture
async def doors() -> AsyncIterator[Doors]:
    doors = Doors()
    yield doors
    doors.close()


def invented(number: int, places: list[str]) -> tuple[PeerId, list[str]]:
    """What a record says of a peer that does not exist."""
    peer = Identity.from_seed("invented", number).peer_id
    return peer, [f"{place}/p2p/{peer}" for place in places]


async def try_all(victim: Libp2pTransport, peers: list[PeerId]) -> None:
    async def one(peer: PeerId) -> None:
        with suppress(NolocoError):
            await victim.open(peer, ECHO, 3.0)

    await asyncio.gather(*map(one, peers))


async def test_a_node_of_the_internet_does_not_knock_at_its_own_machine(
    network: OnLoopback, doors: Doors
) -> None:
    """Before: every one of the eight ports, each time that the peer was tried."""
    places = await doors.open()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    victim = await network.peer("victim", Libp2pConfig(port=port, announce=(f"{OUTSIDE}{port}",)))
    peer, addresses = invented(0, places)
    victim.learn(peer, addresses)
    for _ in range(3):
        await try_all(victim, [peer])
    assert doors.knocks == 0


async def test_records_have_few_addresses_dialled_in_a_minute(network: OnLoopback, doors: Doors) -> None:
    """In a swarm on one machine, where loopback is right. Before: all of them again each time, without end."""
    places = await doors.open()
    victim = await network.peer("victim")
    records = [invented(number, places) for number in range(20)]
    for peer, addresses in records:
        victim.learn(peer, addresses)
    began = time.monotonic()
    for _ in range(5):
        await try_all(victim, [peer for peer, _ in records])
    minutes = 1 + (time.monotonic() - began) / 60
    assert 0 < doors.knocks <= 60 * minutes


async def test_who_asks_to_be_dialled_back_is_dialled_a_few_times(network: OnLoopback, doors: Doors) -> None:
    """Before: as often as it asked, at any port."""
    places = await doors.open()
    ports = [int(place.rsplit("/", 1)[1]) for place in places]
    victim, mallory = await network.peer("victim"), await network.peer("mallory")
    assert await mallory.connect(victim.addresses(), 5.0)
    began = time.monotonic()
    for port in ports * 10:
        assert await victim.dial_back(mallory.peer_id, port, 1.0) == ""
    minutes = 1 + (time.monotonic() - began) / 60
    assert 0 < doors.knocks <= 5 * minutes
