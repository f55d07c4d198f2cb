"""The libp2p transport passes the common suite with real p2pd processes on loopback."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop

from protocol.records.addresses import network_of
from protocol.records.identity import Identity
from protocol.records.records import key_digest, seal_record
from protocol.transport.base import Transport
from protocol.transport.dht_guard import Serializer
from protocol.transport.hivemind_api import DHTID
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from tests.transport_network import DEADLINE, KEY, PATIENCE, Network
from tests.transport_suite import TransportSuite


def pid_of(transport: Transport) -> int:
    assert isinstance(transport, Libp2pTransport)
    assert transport.pid is not None
    return transport.pid


def node_of(transport: Transport) -> Any:
    """Its part of hivemind's DHT."""
    assert isinstance(transport, Libp2pTransport)
    assert transport._session is not None
    return transport._session.dht._node


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # that thread has ended
        return True


class OnLoopback(Network):
    at_once = PATIENCE

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.transports: list[Libp2pTransport] = []
        self.frozen: set[int] = set()

    async def peer(self, name: str, config: Libp2pConfig = Libp2pConfig()) -> Libp2pTransport:  # noqa: B008
        key_file = self.folder / f"{name}.key"
        Identity.from_seed("suite", name).save(key_file)
        transport = Libp2pTransport(key_file, config)
        self.transports.append(transport)
        await transport.start()
        return transport

    def kill(self, transport: Transport) -> None:
        """Its watchdog goes too, as it would with the whole machine."""
        assert isinstance(transport, Libp2pTransport)
        for task in transport._supervisor._tasks:
            task.cancel()
        os.kill(pid_of(transport), signal.SIGKILL)

    def freeze(self, transport: Transport) -> None:
        """Returns when all of its threads stand still: a signal takes its time."""
        pid = pid_of(transport)
        os.kill(pid, signal.SIGSTOP)
        self.frozen.add(pid)
        tasks = Path(f"/proc/{pid}/task")
        while not all(map(_stands_still, tasks.iterdir())):
            time.sleep(0.001)

    def thaw(self, transport: Transport) -> None:
        os.kill(pid_of(transport), signal.SIGCONT)
        self.frozen.discard(pid_of(transport))

    async def inject(
        self, through: Transport, digest: bytes, subkey: str, sealed: bytes, expires: float
    ) -> bool:
        """As a hostile peer would: no check of its own, straight to the others' DHT nodes."""
        assert isinstance(through, Libp2pTransport)
        assert through._session is not None
        api = pytest.importorskip("protocol.transport.hivemind_api")
        protocol = through._session.dht._node.protocol
        answers = [
            await protocol.call_store(
                peer, [api.DHTID.from_bytes(digest)], [msgpack.packb(sealed)], expires, [subkey]
            )
            for peer in list(protocol.routing_table.peer_id_to_uid)
        ]
        assert None not in answers
        return any(all(stored) for stored in answers)

    async def close(self) -> None:
        for pid in self.frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*(transport.close() for transport in self.transports))


class TestOnUvloop(TransportSuite):
    """The loop that the daemon runs on."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)

    @asynccontextmanager
    async def network(self, folder: Path) -> AsyncIterator[OnLoopback]:
        network = OnLoopback(folder)
        try:
            yield network
        finally:
            await network.close()


async def test_a_clock_that_was_ahead_and_is_set_right_is_seen_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its own record of the future stands, in its own store, until the others take its expiry: an hour."""
    network = OnLoopback(tmp_path)
    a, b = await network.pair()
    with monkeypatch.context() as wrong:
        wrong.setattr(b, "now", lambda: time.time() + 7200.0)
        await b.put(KEY, b"from the future", 60, DEADLINE)
        assert await a.get(KEY, DEADLINE) == []
    assert await b.put(KEY, b"set right", 60, DEADLINE)
    (record,) = await a.get(KEY, DEADLINE)
    assert record.value == b"set right"
    assert record.expires < time.time() + 61
    (record,) = await b.get(KEY, DEADLINE)
    assert record.value == b"set right"
    await network.close()


async def test_a_search_that_is_given_up_leaves_no_task_to_complain_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start of a node that knew a dead peer told its volunteer "Task was destroyed but it is pending!"."""
    network = OnLoopback(tmp_path)
    gc.collect()
    caplog.clear()  # of what earlier tests left
    a, b, c = await network.peers("abc")
    assert await a.connect([*b.addresses(), *c.addresses()], DEADLINE)
    network.freeze(c)
    assert await a.get(KEY, 0.2) == []
    await a.put(KEY, b"a", 60, 0.2)
    await asyncio.sleep(0.5)
    gc.collect()
    network.thaw(c)
    await network.close()
    assert "was destroyed" not in caplog.text


async def test_a_peer_that_was_silent_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    """hivemind forgot it, and a visitor that knew nobody else found nothing any more."""
    network = OnLoopback(tmp_path)
    member = await network.peer("member")
    visitor = await network.peer("visitor", Libp2pConfig(client_only=True))
    assert await visitor.connect(member.addresses(), DEADLINE)
    await member.put(KEY, b"here", 60, DEADLINE)
    network.freeze(member)
    assert await visitor.get(KEY, 2.0) == []
    network.thaw(member)
    await visitor.get(KEY, DEADLINE)  # nobody is asked
    (record,) = await visitor.get(KEY, DEADLINE)
    assert record.value == b"here"
    await network.close()


async def test_of_a_large_key_no_more_copies_are_read_than_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is most of what a look costs. A holder that hides a key does not hide it from those who ask another."""
    network = OnLoopback(tmp_path)
    reader, *holders = await network.peers("rabc")
    for holder in holders:
        assert await reader.connect(holder.addresses(), DEADLINE)
    await reader.get(KEY, DEADLINE)  # all are in its table
    expires = time.time() + 60
    written = [Identity.from_seed("replica", number) for number in range(40)]

    def hold(key: str, identities: Sequence[Identity], by: Sequence[Transport]) -> None:
        digest = DHTID.from_bytes(key_digest(key))
        for holder in by:
            storage = node_of(holder).protocol.storage
            for identity in identities:
                sealed = seal_record(identity, key, b"value", expires)
                assert storage.store_subkey(digest, identity.peer_id, Serializer.dumps(sealed), expires)

    copies_sent = 0
    find = node_of(reader)._call_find_with_blacklist

    async def counted(peer: DHTID, keys: Sequence[DHTID]) -> Any:
        nonlocal copies_sent
        found = await find(peer, keys)
        copies_sent += any(value is not None for value, _ in (found or {}).values())
        return found

    async def look(key: str, copies: int) -> tuple[int, int]:
        nonlocal copies_sent
        copies_sent = 0
        return len(await reader.get(key, DEADLINE, copies=copies)), copies_sent

    monkeypatch.setattr(node_of(reader), "_call_find_with_blacklist", counted)
    hold(f"{KEY}/large", written, holders)
    hold(f"{KEY}/small", written[:5], holders)
    hold(f"{KEY}/hidden", written, holders[:1])
    assert await look(f"{KEY}/large", 1) == (40, 1)
    assert await look(f"{KEY}/large", 2) == (40, 2)
    assert await look(f"{KEY}/small", 1) == (5, 3)
    assert await look(f"{KEY}/hidden", 1) == (40, 1)
    assert await look(f"{KEY}/nothing", 1) == (0, 0)
    await network.close()


async def test_where_a_connection_comes_from_is_known_whatever_the_peer_says(tmp_path: Path) -> None:
    network = OnLoopback(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    elsewhere = Libp2pConfig(port=port, announce=("/ip4/9.9.9.9/tcp/4000",))
    liar, member = await network.peer("liar", elsewhere), await network.peer("member")
    assert await liar.connect(member.addresses(), DEADLINE) == [member.peer_id]
    seen = await member.remotes()
    assert {network_of([address]) for address in seen[liar.peer_id]} == {"127.0.0.0/24"}
    await network.close()


async def test_the_address_that_answered_is_among_a_peers_own(tmp_path: Path) -> None:
    """Failed before: of a peer that names none to be dialled, as within a VPN, a node that left kept no way back."""
    network = OnLoopback(tmp_path)
    try:
        near, far = await network.peer("near"), await network.peer("far")
        await near.connect(far.addresses(), PATIENCE)
        assert near._session is not None

        async def none_named(peer: str) -> list[str]:
            return []

        near._session.addresses_of = none_named  # type: ignore[method-assign, assignment]
        [(peer, addresses)] = await near.peers()
        assert peer == far.peer_id
        assert set(addresses) & set(far.addresses())
    finally:
        for transport in network.transports:
            await transport.close()
