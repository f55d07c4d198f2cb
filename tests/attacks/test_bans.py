"""A peer that was banned: its connection ends, and no byte is read of what it opens afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.access.peer_limits import BAN_AFTER_STRIKES
from protocol.errors import DeadlineExceeded, NolocoError
from protocol.messages.training import Ready
from protocol.records.identity import Identity
from protocol.records.records import key_digest
from protocol.rpc.rpc import Rpc, Traffic
from protocol.transport.libp2p import Libp2pTransport
from tests.attacks.test_dht import Stranger, record
from tests.real.test_libp2p_transport import OnLoopback
from tests.transport_network import DEADLINE, KEY, PATIENCE
from tests.unit.two_peers import say_done

SECONDS = 4.0
AT_ONCE = 16


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[OnLoopback]:
    network = OnLoopback(tmp_path)
    yield network
    await network.close()


async def connected(network: OnLoopback, rpc: Rpc, peer: str) -> bool:
    return peer in {known for known, _ in await rpc.transport.peers()}


async def a_ban(network: OnLoopback) -> tuple[Rpc, Rpc, Libp2pTransport]:
    """A node, an honest peer, and one that sent ten frames of nonsense."""
    victim, honest = Rpc(await network.peer("victim")), Rpc(await network.peer("honest"))
    mallory = await network.peer("mallory")
    victim.handle(Ready.answered_by(say_done))
    await victim.start()
    for transport in (honest.transport, mallory):
        assert await transport.connect(victim.transport.addresses(), DEADLINE)
    for _ in range(BAN_AFTER_STRIKES):
        stream = await mallory.open(victim.transport.peer_id, Traffic.PAIRING.protocol, DEADLINE)
        await stream.write(b"GET / HTTP/1.1" + bytes(64))
        with pytest.raises(NolocoError):
            await asyncio.wait_for(stream.read(1 << 16), PATIENCE)
        stream.close()
    return victim, honest, mallory


async def test_a_ban_ends_the_connection(network: OnLoopback) -> None:
    """Before: the connection stayed, and so did whatever p2pd did for it."""
    victim, honest, mallory = await a_ban(network)
    assert victim.is_banned(mallory.peer_id)
    await asyncio.sleep(0.5)
    assert not await connected(network, victim, mallory.peer_id)
    assert await connected(network, victim, honest.transport.peer_id)


async def test_streams_that_a_banned_peer_opens_end_before_they_are_read(network: OnLoopback) -> None:
    """Before: 1,100 streams a second were accepted, each with a task and a channel of its own."""
    victim, honest, mallory = await a_ban(network)
    ends, opened, accepted = time.monotonic() + SECONDS, 0, 0

    async def knock() -> None:
        nonlocal opened, accepted
        while time.monotonic() < ends:
            opened += 1
            try:
                stream = await mallory.open(victim.transport.peer_id, Traffic.PAIRING.protocol, DEADLINE)
            except NolocoError:
                await asyncio.sleep(0)
                continue
            accepted += 1
            stream.close()

    knocking = [asyncio.create_task(knock()) for _ in range(AT_ONCE)]
    waited = 0.0
    while time.monotonic() < ends:
        began = time.monotonic()
        await honest.call(victim.transport.peer_id, Ready(pair="p"), deadline=DEADLINE)
        waited = max(waited, time.monotonic() - began)
        await asyncio.sleep(0.1)
    await asyncio.gather(*knocking)
    assert opened > AT_ONCE
    assert not accepted
    assert waited < 1.0
    assert not victim.streams_of(mallory.peer_id)


async def test_who_is_banned_and_comes_slowly_waits_instead_of_connecting_anew(network: OnLoopback) -> None:
    """Before: each stream ended the connection, and the next handshake cost more than the stream had."""
    victim, honest, mallory = await a_ban(network)
    await mallory.connect(victim.transport.addresses(), DEADLINE)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await mallory.open(victim.transport.peer_id, Traffic.PAIRING.protocol, 1.0)
        assert await connected(network, victim, mallory.peer_id)
    assert not victim.streams_of(mallory.peer_id)
    await honest.call(victim.transport.peer_id, Ready(pair="p"), deadline=DEADLINE)


async def test_the_dht_does_not_answer_a_banned_peer_either(network: OnLoopback) -> None:
    _, _, mallory = await a_ban(network)
    stranger = Stranger(mallory)
    victim = network.transports[0]
    assert isinstance(await stranger.find(victim, [key_digest(KEY)]), Exception)
    entry = record(Identity.from_seed("suite", "mallory"), KEY)
    assert isinstance(await stranger.store(victim, [entry]), Exception)
    assert isinstance(await stranger.ping(victim, stranger.me), Exception)


async def test_who_is_banned_takes_no_place_of_those_who_are_dialled_again(network: OnLoopback) -> None:
    """Before: fifty that came back all the time filled the book, and p2pd was asked for the addresses of each."""
    victim, honest, mallory = await network.peers("vhm")
    for peer in (honest, mallory):
        assert await peer.connect(victim.addresses(), DEADLINE)
    assert isinstance(victim, Libp2pTransport)
    assert victim._session is not None
    victim.refuses = lambda peer: peer == mallory.peer_id
    victim._book.clear()
    await victim._look_around(victim._session)
    assert list(victim._book) == [honest.peer_id]
