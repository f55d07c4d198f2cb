"""A caller and a server on the in-memory network, and handlers for the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.messages import Done
from protocol.messages.training import Forward, Gradient, Ready
from protocol.records.identity import Identity
from protocol.rpc.patience import Patience
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import Stream


@dataclass
class Two:
    """A caller and a server that know each other."""

    network: MemoryNetwork
    caller: Rpc
    server: Rpc

    async def ask(self, message: Any = None, deadline: float | Patience = 5.0, **more: Any) -> Any:
        more.setdefault("traffic", Traffic.GOSSIP)
        call = self.caller.call_and_read if "read" in more else self.caller.call
        return await call(self.address, message or Ready(pair="p"), deadline=deadline, **more)

    @property
    def address(self) -> Any:
        return self.server.transport.peer_id

    async def raw_stream(self) -> Stream:
        return await self.caller.transport.open(self.address, Traffic.GOSSIP.protocol, 5.0)


@asynccontextmanager
async def two_peers(link: Link | None = None) -> AsyncIterator[Two]:
    network = MemoryNetwork(0, link or Link(latency=0.01))
    peers = []
    for name in ("caller", "server"):
        transport = MemoryTransport(network, Identity.from_seed(name))
        await transport.start()
        peers.append(Rpc(transport))
        await peers[-1].start()
    try:
        yield Two(network, *peers)
    finally:
        for rpc in peers:
            await rpc.close()
            await rpc.transport.close()


class Raw:
    """The message of an answer, with any body."""

    def __init__(self, kind: str, body: Any) -> None:
        self.kind, self.body = kind, body

    def told(self) -> Any:
        return self.body

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.body.items() if isinstance(self.body, dict) else ())


def idle(rpc: Rpc) -> str:
    """What shows of one that keeps nothing of others."""
    nothing = "Channels: 0 open, 0 opening | Streams: of 0 peers | Places: 0 held | Coming: 0 B | Tasks: 0"
    return f"<Rpc [Peer: …{rpc.transport.peer_id[-8:]} | {nothing}]>"


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def say_done(request: Request[Any]) -> Answer[Done]:
    return Answer(Done())


def gradient(number: int) -> Gradient:
    return Gradient(loss=0.5, queue=0, step=number, seconds=0.1)


def after(
    delay: Callable[[Request[Forward]], float],
) -> Callable[[Request[Forward]], Awaitable[Answer[Gradient]]]:
    async def handler(request: Request[Forward]) -> Answer[Gradient]:
        await asyncio.sleep(delay(request))
        return Answer(gradient(request.message.stage))

    return handler


def forward(number: int) -> Forward:
    return Forward(microbatch=f"m{number}", stage=number)
