"""p2pd may die at any time: the peer comes back as the same one, with its handlers, peers and records."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from protocol.errors import PeerUnreachable, TransportDown
from protocol.ground import PeerId
from protocol.transport.base import Transport
from protocol.transport.libp2p import WATCHDOG, Libp2pTransport
from protocol.transport.libp2p_session import Session
from tests.real.test_libp2p_transport import OnLoopback, pid_of
from tests.transport_network import DEADLINE, ECHO, KEY, PATIENCE, ask, eventually


@pytest_asyncio.fixture
async def network(tmp_path: Path) -> AsyncIterator[OnLoopback]:
    network = OnLoopback(tmp_path)
    yield network
    await network.close()


async def kill_p2pd_and_wait(transport: Libp2pTransport) -> None:
    """Until the watchdog has another p2pd running and has dialled the peers that it knew."""
    before = pid_of(transport)
    os.kill(before, signal.SIGKILL)

    async def back() -> object:
        return transport.pid not in (None, before) and await transport.peers()

    await eventually(back)


async def known_to(transport: Libp2pTransport) -> None:
    """Until the transport has noticed who is connected."""

    async def noticed() -> object:
        return "Book: 0 peers" not in repr(transport)

    await eventually(noticed)


async def talk(a: Transport, b: Transport) -> None:
    stream = await a.open(b.peer_id, ECHO, DEADLINE)
    assert await ask(stream, b"hello") == b"hello"
    stream.close()


async def test_a_dialler_comes_back_with_streams_and_records(network: OnLoopback) -> None:
    a, b = await network.pair()
    assert isinstance(a, Libp2pTransport)
    assert await a.put(KEY, b"a", 60, DEADLINE)
    addresses = a.addresses()
    await kill_p2pd_and_wait(a)
    assert a.addresses() == addresses
    await talk(a, b)
    assert await a.put(KEY, b"a again", 60, DEADLINE)
    assert [record.value for record in await b.get(KEY, DEADLINE)] == [b"a again"]


async def test_a_peer_that_was_dialled_comes_back_and_serves(network: OnLoopback) -> None:
    a, b = await network.pair()
    assert isinstance(b, Libp2pTransport)
    assert await b.put(KEY, b"b", 60, DEADLINE)
    await known_to(b)
    await kill_p2pd_and_wait(b)
    await talk(a, b)
    assert [record.value for record in await a.get(KEY, DEADLINE)] == [b"b"]


async def test_own_records_come_back_when_nobody_else_had_them(network: OnLoopback) -> None:
    a = await network.peer("a")
    assert await a.put(KEY, b"mine", 60, DEADLINE)
    before = pid_of(a)
    os.kill(before, signal.SIGKILL)

    async def found_again() -> object:
        """Not in what the p2pd that died had left."""
        return a.pid not in (None, before) and await found(a)

    await eventually(found_again)
    assert await found(a) == [b"mine"]


async def found(transport: Transport) -> list[bytes]:
    try:
        return [record.value for record in await transport.get(KEY, DEADLINE)]
    except TransportDown:
        return []


async def test_while_p2pd_is_down_everything_says_so_at_once(
    network: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await network.pair()
    assert isinstance(a, Libp2pTransport)
    stream = await a.open(b.peer_id, ECHO, DEADLINE)

    async def never(self: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Libp2pTransport, "_revive", never)
    os.kill(pid_of(a), signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(PeerUnreachable):
            await stream.read(1)
        for call in (
            lambda: a.open(b.peer_id, ECHO, DEADLINE),
            lambda: a.get(KEY, DEADLINE),
            lambda: a.put(KEY, b"", 60, DEADLINE),
            lambda: a.peers(),
            lambda: a.connect(b.addresses(), DEADLINE),
        ):
            with pytest.raises(TransportDown):
                await call()
    stream.close()


async def test_it_survives_several_deaths_in_a_row(network: OnLoopback) -> None:
    a, b = await network.pair()
    assert isinstance(a, Libp2pTransport)
    for _ in range(3):
        await kill_p2pd_and_wait(a)
    await talk(a, b)


async def test_the_watchdog_outlives_its_own_failure(
    network: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next death of p2pd is for good."""
    a, b = await network.pair()
    assert isinstance(a, Libp2pTransport)
    connected, failures = Session.connected, [RuntimeError("p2pd names a peer that is none")]

    async def fails_once(self: Session) -> list[PeerId]:
        if self is a._session and failures:
            raise failures.pop()
        return await connected(self)

    monkeypatch.setattr(Session, "connected", fails_once)

    async def started_again() -> object:
        return any(part.name == WATCHDOG and part.restarts for part in a._supervisor.parts())

    await eventually(started_again)
    await kill_p2pd_and_wait(a)
    await talk(a, b)
