"""Real peers that are taken for hidden and can be dialled: direct connections come first, streams move to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.messages import Done
from protocol.messages.training import Ready
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import Stream
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from protocol.transport.relayed_stream import RelayedStream
from tests.patience import patience

ECHO = "/test/echo/1"
SLOW = 8.0  # seconds that an answer takes while its stream is left for another


@dataclass
class Three:
    """Two peers that both have dialled the one between them; the far one listens, and its record says otherwise."""

    near: Libp2pTransport
    between: Libp2pTransport
    far: Libp2pTransport

    async def opened(self) -> Stream:
        return await self.near.open(self.far.peer_id, ECHO, patience(60.0))


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1_000))


@asynccontextmanager
async def three(directory: Path, *, far_listens: bool = True) -> AsyncIterator[Three]:
    made = []
    for name in ("near", "between", "far"):
        Identity.from_seed("direct", name).save(directory / name)
        # the near one is no part of the DHT, through which libp2p would connect the two by itself
        listens = name == "between" or (name == "far" and far_listens)
        config = Libp2pConfig(host="127.0.0.1", client_only=not listens)
        made.append(Libp2pTransport(directory / name, config))
    trio = Three(*made)
    try:
        for transport in made:
            await transport.start()
        for transport in (trio.near, trio.far):
            await transport.connect(trio.between.addresses(), patience(60.0))
        await trio.far.serve(ECHO, echo)
        trio.between.pass_on(1e9)
        trio.between.keep_way_to(trio.far.peer_id)
        trio.near.learn_ways(trio.far.peer_id, [trio.between.peer_id])
        yield trio
    finally:
        for transport in made:
            await transport.close()


async def until_direct(trio: Three) -> None:
    async with asyncio.timeout(patience(60.0)):
        while not (await trio.near.remotes()).get(trio.far.peer_id):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_peer_that_wrongly_believes_that_it_is_hidden_is_dialled_first(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        assert not (await trio.near.remotes()).get(trio.far.peer_id)
        trio.near.learn(trio.far.peer_id, trio.far.addresses())
        stream = await trio.opened()
        await stream.write(bytes(1_000))
        await stream.read(1_000)
        assert not isinstance(stream, RelayedStream)
        assert trio.between.passed_on == 0
        stream.close()


async def test_an_address_at_which_nobody_is_holds_a_stream_up_for_a_moment_alone(tmp_path: Path) -> None:
    async with three(tmp_path, far_listens=False) as trio:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # and never answers
            port = silent.getsockname()[1]
            trio.near.learn(trio.far.peer_id, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{trio.far.peer_id}"])
            stream = await trio.opened()
        assert isinstance(stream, RelayedStream)
        assert stream.through == trio.between.peer_id
        stream.close()


async def test_streams_move_to_a_direct_connection_and_what_is_under_way_is_answered(tmp_path: Path) -> None:
    async with three(tmp_path) as trio:
        near, far = Rpc(trio.near), Rpc(trio.far)

        async def on_ready(request: Request[Ready]) -> Answer[Done]:
            if request.message.pair == "slow":
                await asyncio.sleep(SLOW)
            return Answer(Done())

        far.handle(Ready.answered_by(on_ready, Traffic.GOSSIP))
        await near.start()
        await far.start()

        async def ask(pair: str) -> None:
            wait = patience(60.0)
            await near.call(trio.far.peer_id, Ready(pair=pair), deadline=wait, traffic=Traffic.GOSSIP)

        try:
            await ask("first")
            passed = trio.between.passed_on
            assert passed > 0
            assert isinstance(near.channels[0].stream, RelayedStream)
            slow = asyncio.create_task(ask("slow"))
            trio.near.learn(trio.far.peer_id, trio.far.addresses())
            await until_direct(trio)
            await asyncio.sleep(4.0)  # until it is looked who is connected
            await ask("moved")
            assert not isinstance(near.channels[0].stream, RelayedStream)
            await slow
            await asyncio.sleep(1.0)  # until the old stream is closed
            passed = trio.between.passed_on
            for number in range(20):
                await ask(str(number))
            assert trio.between.passed_on == passed
            assert len(near.channels) == 1
        finally:
            await near.close()
            await far.close()
