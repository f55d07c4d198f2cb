"""What one hostile peer can make a node hold, over real p2pd: counted, and seen in the processes' memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import uvloop

from protocol.access.peer_limits import places_for
from protocol.codecs.codec import Encoded, encode
from protocol.messages import Done
from protocol.messages.frame import FrameType
from protocol.messages.training import Ready
from protocol.rpc.frames import write_frame
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import Stream, Transport
from tests.real.test_libp2p_transport import OnLoopback, pid_of
from tests.transport_network import DEADLINE, PATIENCE

PAYLOAD = 4 << 20
STREAMS = 4
REQUESTS = 40  # of each stream: together ten times what may be held
SLACK = 64 << 20  # the allocator's, the transport's windows of some MiB for each stream
QUIET = 1.0  # seconds without progress: everything that can be full is full


@dataclass
class Attacked:
    """A node and a peer that opens streams to it. `begun` counts the requests that the node has begun to answer."""

    node: Transport
    rpc: Rpc  # the node's
    attacker: Transport
    begun: int = 0

    def memory(self) -> int:
        """Of this process, where the attacker holds no more than one message, and of the node's p2pd."""
        return sum(psutil.Process(pid).memory_info().rss for pid in (psutil.Process().pid, pid_of(self.node)))

    async def grown_while(self, write: Callable[[Stream], Awaitable[None]]) -> int:
        """Run `write` on several streams until all of them are stuck; by how many bytes the node has grown."""
        streams = [
            await self.attacker.open(self.node.peer_id, Traffic.STATE.protocol, DEADLINE)
            for _ in range(STREAMS)
        ]
        before = self.memory()
        writers = [asyncio.ensure_future(write(stream)) for stream in streams]
        begun = -1
        while begun != self.begun:
            begun = self.begun
            await asyncio.sleep(QUIET)
        grown = self.memory() - before
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        for stream in streams:
            stream.close()
        return grown


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[Attacked]:
    """The node answers every request with as much as its class allows."""
    network = OnLoopback(folder)
    try:
        node, attacker = await network.peers("na")
        rpc = Rpc(node, {Traffic.STATE: PAYLOAD})
        scene = Attacked(node, rpc, attacker)

        async def answer(request: Request) -> Answer:
            scene.begun += 1
            return Answer(Done(), [full_payload(scene.begun)])

        rpc.handle(Ready.answered_by(answer, Traffic.STATE))
        await rpc.start()
        assert await attacker.connect(node.addresses(), DEADLINE) == [node.peer_id]
        try:
            yield scene
        finally:
            await rpc.close()
    finally:
        await network.close()


def full_payload(value: int = 0) -> Encoded:
    return encode(torch.full((PAYLOAD,), value % 100, dtype=torch.uint8).view(torch.float32), "fp32")


async def keep_asking(stream: Stream, tensors: list[Encoded], requests: int = REQUESTS) -> None:
    for number in range(requests):
        await write_frame(stream, FrameType.REQUEST, number, Ready.kind, {"pair": "p"}, tensors)


def test_requests_whose_answers_are_never_read_are_held_up_to_a_bound(tmp_path: Path) -> None:
    async def main() -> None:
        async with attacked(tmp_path) as scene:
            tensors = [full_payload()]
            grown = await scene.grown_while(lambda stream: keep_asking(stream, tensors))
            places = places_for(PAYLOAD)
            sent = 4 * STREAMS  # answers that left for the attacker's p2pd free their places
            assert scene.begun <= places + sent < STREAMS * REQUESTS
            assert grown <= (2 * places + STREAMS) * PAYLOAD + SLACK

    uvloop.run(main())


def test_large_answers_to_small_requests_are_held_up_to_a_bound(tmp_path: Path) -> None:
    async def main() -> None:
        async with attacked(tmp_path) as scene:
            grown = await scene.grown_while(lambda stream: keep_asking(stream, []))
            places = places_for(PAYLOAD)
            assert scene.begun <= places + 4 * STREAMS < STREAMS * REQUESTS
            assert grown <= places * PAYLOAD + SLACK

    uvloop.run(main())


def test_coming_back_with_new_streams_brings_no_new_places(tmp_path: Path) -> None:
    """Requests of streams that are closed meanwhile still count for as long as they are being answered."""

    async def main() -> None:
        async with attacked(tmp_path) as scene:

            async def never(request: Request) -> Answer:
                scene.begun += 1
                await asyncio.sleep(3600)
                return Answer(Done())

            scene.rpc.handle(Ready.answered_by(never, Traffic.STATE))
            places = places_for(PAYLOAD)
            for turn in range(3):
                stream = await scene.attacker.open(scene.node.peer_id, Traffic.STATE.protocol, DEADLINE)
                await keep_asking(stream, [], places - 1)
                async with asyncio.timeout(PATIENCE):
                    while scene.begun < (places if turn else places - 1):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                stream.close()
            await asyncio.sleep(QUIET)  # and no more come
            assert scene.begun == places

    uvloop.run(main())
