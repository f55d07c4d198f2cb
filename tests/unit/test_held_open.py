"""Connections that are held open for p2pd: how many there are, what ends them, and how p2pd is reached."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from protocol.records.identity import Identity
from protocol.transport import held_open, libp2p
from protocol.transport.held_open import Copying, multiaddress, p2pd_at
from protocol.transport.libp2p import MOST_HELD, Libp2pTransport
from protocol.transport.punching import MOST_SEEN
from tests.unit.two_peers import in_virtual_time


class Socket:
    """A connection that is being begun. Mutable state: whether it is open."""

    is_open = True

    def getsockname(self) -> tuple[str, int]:
        return "0.0.0.0", 4001

    def close(self) -> None:
        self.is_open = False


def begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Libp2pTransport, list[Socket]]:
    """A transport, and the connections that it has begun, none of which is ever answered."""
    Identity.from_seed("holds").save(tmp_path / "key")
    transport, begun = Libp2pTransport(tmp_path / "key"), list[Socket]()

    def begin(*_: object) -> Socket:
        begun.append(Socket())
        return begun[-1]

    async def answered(_: Socket) -> bool:
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(transport, "_up", lambda: None)
    monkeypatch.setattr(libp2p, "begun", begin)
    monkeypatch.setattr(libp2p, "answered", answered)
    return transport, begun


def address_of(name: int) -> str:
    return f"/ip4/9.9.2.1/tcp/4002/p2p/{Identity.from_seed('held', name).peer_id}"


def begun_of(transport: Libp2pTransport, addresses: list[str]) -> int:
    count = 0
    for address in addresses:
        try:
            transport._begin(address)
        except OSError:
            continue
        count += 1
    return count


async def test_connections_that_are_being_begun_count_as_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, begun = begins(tmp_path, monkeypatch)
    assert begun_of(transport, [address_of(0)] * 5) == MOST_SEEN, "of one peer"
    assert begun_of(transport, [address_of(name) for name in range(1, 100)]) == MOST_HELD - MOST_SEEN
    await transport._supervisor.close()  # before any of them has begun to wait
    await asyncio.sleep(0)
    assert not any(one.is_open for one in begun)
    assert begun_of(transport, [address_of(0)]) == 1, "those that have ended count no more"
    await transport._supervisor.close()


class Writer:
    """The sending side of a connection whose other end takes nothing."""

    def __init__(self) -> None:
        self.transport = self

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        await asyncio.Event().wait()


@in_virtual_time
async def test_an_end_that_takes_nothing_is_not_waited_for() -> None:
    talks, silent = asyncio.StreamReader(), asyncio.StreamReader()
    talks.feed_data(b"a state")
    talks.feed_eof()  # p2pd has given it up, which shows once the bytes before have gone
    one: Any = (talks, Writer())
    other: Any = (silent, Writer())
    async with asyncio.timeout(10 * held_open.STUCK):
        await Copying(one, other).run()


async def test_segments_to_p2pd_are_as_small_as_those_of_the_internet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their number headers are counted, see `tcp_counts`."""

    async def connect(near: socket.socket, place: tuple[str, int]) -> None:
        near.setblocking(True)
        near.connect(place)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = await held_open._to_p2pd("127.0.0.1", listening.getsockname()[1])
        p2pds, _ = listening.accept()
        with near, p2pds:
            assert p2pds.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1448


@pytest.mark.parametrize(
    ("host", "at"),
    [
        ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.168.1.2", "192.168.1.2"),
        ("2001:4860::1", "2001:4860::1"),
    ],
)  # fmt: skip
def test_p2pd_is_reached_where_it_listens(host: str, at: str) -> None:
    assert p2pd_at(host) == at
    assert multiaddress(at, 4001) == f"/ip{6 if ':' in at else 4}/{at}/tcp/4001"


def test_two_ports_that_have_a_connection_get_another_one_from_a_third() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        first.connect(there.getsockname())
        with held_open.begun(multiaddress(*there.getsockname()), "127.0.0.1", port) as second:
            assert second.getsockname()[1] != port
            assert second.getpeername() == there.getsockname()
