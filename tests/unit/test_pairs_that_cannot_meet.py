"""Peers that cannot reach each other learn it from records and wait for no deadline: over a network that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.errors import DeadlineExceeded, PeerUnreachable
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.transport.base import Stream
from protocol.transport.libp2p import DIRECT_DEADLINE, HEAD_START, Libp2pTransport

ECHO = "/test/echo/1"
DEADLINE = 20.0
FAR, BETWEEN = (Identity.from_seed("cannot meet", name).peer_id for name in ("far", "between"))
STREAM = object()  # that a connection gives


@dataclass
class Hanging:
    """Stands for p2pd's session: what it dials hangs. Mutable state: who is connected, and what was dialled."""

    places: dict[PeerId, list[str]] = field(default_factory=dict)
    dialled: list[PeerId] = field(default_factory=list)
    addresses: Sequence[str] = ("/ip4/9.9.9.9/tcp/4001",)

    def __post_init__(self) -> None:
        self.exited = asyncio.get_running_loop().create_future()

    async def remotes(self) -> dict[PeerId, list[str]]:
        return self.places

    async def connected(self, deadline: float = DEADLINE) -> list[PeerId]:
        return list(self.places)

    async def dial_any(self, peer: PeerId, addresses: list[str], deadline: float) -> bool:
        self.dialled.append(peer)
        await asyncio.sleep(deadline)
        return False

    async def open(self, peer: PeerId, protocol: str, deadline: float, **_: object) -> object:
        if peer in self.places:
            return STREAM
        await asyncio.sleep(deadline)
        raise DeadlineExceeded("nobody answers")


@asynccontextmanager
async def far_one(folder: Path, through: Sequence[PeerId]) -> AsyncIterator[tuple[Libp2pTransport, Hanging]]:
    """A peer that knows the record of a far one, with an address that leads nowhere and these ways in."""
    Identity.from_seed("cannot meet", "near").save(folder / "key")
    transport, session = Libp2pTransport(folder / "key"), Hanging()
    transport._session = session  # type: ignore[assignment]
    transport.learn(FAR, [f"/ip4/8.8.8.8/tcp/4001/p2p/{FAR}"])
    transport.learn_ways(FAR, through)
    try:
        yield transport, session
    finally:
        await transport.close()


async def seconds_to_fail(transport: Libp2pTransport) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises((PeerUnreachable, DeadlineExceeded)):
        await transport.open(FAR, ECHO, DEADLINE)
    return clock() - began


def test_one_whose_record_names_nobody_but_itself_is_given_up_without_a_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with far_one(tmp_path, [FAR]) as (transport, session):
            assert await seconds_to_fail(transport) == pytest.approx(HEAD_START), "it may be taken for hidden"
            for _ in range(5):
                assert await seconds_to_fail(transport) == 0.0
            assert session.dialled == [FAR]

    run_virtual(main())


def test_without_that_the_whole_deadline_would_go_by(tmp_path: Path) -> None:
    async def main() -> None:
        async with far_one(tmp_path, []) as (transport, _):
            assert await seconds_to_fail(transport) == pytest.approx(DEADLINE)

    run_virtual(main())


def test_one_that_came_by_itself_is_reached_on_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with far_one(tmp_path, [FAR]) as (transport, session):
            session.places[FAR] = ["/ip4/8.8.8.8/tcp/50000"]
            opened: Stream = await transport.open(FAR, ECHO, DEADLINE)
            assert opened is STREAM
            assert not session.dialled

    run_virtual(main())


def test_third_peers_are_needed_where_nobody_can_dial_either_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with far_one(tmp_path, [BETWEEN]) as (transport, session):
            assert not transport.goes_through_others(FAR), "it dials this one"
            transport.is_hidden = True
            assert transport.goes_through_others(FAR)
            assert not transport.goes_through_others(BETWEEN)
            session.places[FAR] = ["/ip4/8.8.8.8/tcp/50000"]
            await transport.open(FAR, ECHO, DEADLINE)
            assert not transport.goes_through_others(FAR), "there is a connection, as within one home network"
            session.places.clear()
            await asyncio.sleep(DIRECT_DEADLINE)
            with pytest.raises((PeerUnreachable, DeadlineExceeded)):
                await transport.open(FAR, ECHO, DEADLINE)
            assert transport.goes_through_others(FAR)

    run_virtual(main())
