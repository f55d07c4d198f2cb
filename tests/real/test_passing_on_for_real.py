"""Streams between real peers that go through a third one, which counts and bounds them and cannot read them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.errors import DeadlineExceeded, PeerUnreachable
from protocol.records.identity import Identity
from protocol.transport.base import Stream
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from protocol.transport.passing_on import MOST_OF_PEER

ECHO = "/test/echo/1"
PATIENCE = 60.0


@dataclass
class Three:
    """Two peers that are not connected, and one between them that both have dialled."""

    near: Libp2pTransport
    between: Libp2pTransport
    far: Libp2pTransport

    async def opened(self) -> Stream:
        return await self.near.open(self.far.peer_id, ECHO, PATIENCE)


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1_000))


@asynccontextmanager
async def three(directory: Path) -> AsyncIterator[Three]:
    made = []
    for name in ("near", "between", "far"):
        Identity.from_seed(name).save(directory / name)
        hidden = Libp2pConfig(
            client_only=name != "between"
        )  # which listens nowhere, so that nobody can dial it
        made.append(Libp2pTransport(directory / name, hidden))
    try:
        for transport in made:
            await transport.start()
        trio = Three(*made)
        for transport in (trio.near, trio.far):
            await transport.connect(trio.between.addresses(), PATIENCE)
        await trio.far.serve(ECHO, echo)
        trio.near.learn_ways(trio.far.peer_id, [trio.between.peer_id])
        yield trio
    finally:
        for transport in made:
            await transport.close()


async def test_a_stream_goes_through_the_peer_between_and_is_counted_there(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        trio.between.pass_on(1e9)
        assert trio.between.keep_way_to(trio.far.peer_id)
        stream = await trio.opened()
        assert stream.remote == trio.far.peer_id
        sent = os.urandom(2_000_000)

        async def write() -> None:
            await stream.write(sent[:7], b"", memoryview(sent)[7:])

        writing = asyncio.create_task(write())
        assert b"".join([bytes(await stream.read(100_000)) for _ in range(20)]) == sent
        await writing
        assert 2 * len(sent) < trio.between.passed_on < 2.1 * len(sent)
        assert trio.near.passed_on == trio.far.passed_on == 0
        stream.close()


async def test_the_far_end_is_told_whose_stream_it_is(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        trio.between.pass_on(1e9)
        trio.between.keep_way_to(trio.far.peer_id)
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            found.set_result(stream.remote)

        await trio.far.serve("/test/who/1", handler)
        stream = await trio.near.open(trio.far.peer_id, "/test/who/1", PATIENCE)
        assert await found == trio.near.peer_id
        stream.close()
        trio.far.refuses = lambda peer: peer == trio.near.peer_id
        with pytest.raises((PeerUnreachable, DeadlineExceeded)):
            await trio.opened()


async def test_nothing_is_passed_on_unasked_or_beyond_the_bound(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        assert not trio.between.keep_way_to(trio.far.peer_id), "it is not willing"
        trio.between.pass_on(1e9)
        with pytest.raises(PeerUnreachable, match="through"):
            await trio.opened()
        trio.between.keep_way_to(trio.far.peer_id)
        streams = [await trio.opened() for _ in range(MOST_OF_PEER)]
        with pytest.raises(PeerUnreachable, match="through"):
            await trio.opened()
        for stream in streams:
            stream.close()
        trio.near.learn_ways(trio.far.peer_id, [])


async def test_a_rate_is_kept(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        trio.between.pass_on(1e5)
        trio.between.keep_way_to(trio.far.peer_id)
        stream, clock = await trio.opened(), asyncio.get_running_loop().time
        began = clock()
        await stream.write(bytes(100_000))
        for _ in range(10):
            await stream.read(10_000)
        assert clock() - began > 1.5, "200 kB at 100 kB/s, a burst less"
        stream.close()


async def test_a_peer_between_that_ends_ends_its_streams(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        trio.between.pass_on(1e9)
        trio.between.keep_way_to(trio.far.peer_id)
        stream = await trio.opened()
        await trio.between.close()
        with pytest.raises(PeerUnreachable):
            await stream.read(1)
        stream.close()
