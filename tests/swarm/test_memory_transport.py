"""The in-memory transport passes the common suite, under a virtual clock and in real time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bootstrap.lab.in_memory.memory import Link, MemoryNetwork, MemoryTransport
from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.records.identity import Identity
from protocol.transport.base import Transport
from tests.transport_network import Network
from tests.transport_suite import TransportSuite


class InMemory(Network):
    at_once = 2.0

    def __init__(self, link: Link) -> None:
        self.world = MemoryNetwork(seed=1, link=link)
        self.transports: list[Transport] = []

    async def peer(self, name: str) -> Transport:
        transport = MemoryTransport(self.world, Identity.from_seed("suite", name))
        self.transports.append(transport)
        await transport.start()
        return transport

    def kill(self, transport: Transport) -> None:
        self.world.kill(transport.peer_id)

    def freeze(self, transport: Transport) -> None:
        self.world.freeze(transport.peer_id)

    def thaw(self, transport: Transport) -> None:
        self.world.thaw(transport.peer_id)

    async def inject(
        self, through: Transport, digest: bytes, subkey: str, sealed: bytes, expires: float
    ) -> bool:
        island = await self.world.search(through.peer_id)
        return island.put(digest, subkey, sealed, expires, self.world.now())


class TestUnderVirtualTime(TransportSuite):
    link = Link(latency=0.03, bandwidth=100e6, jitter=0.01)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        run_virtual(main)

    @asynccontextmanager
    async def network(self, folder: Path) -> AsyncIterator[Network]:
        network = InMemory(self.link)
        try:
            yield network
        finally:
            for transport in network.transports:
                await transport.close()
