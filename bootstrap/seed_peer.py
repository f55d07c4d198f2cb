"""The seed peer: a well-known first address. It greets newcomers and keeps DHT records; it trains nothing.

Members keep the DHT among themselves, so the run goes on when it dies, and any member can be joined through.
"""

from __future__ import annotations

from typing import Any

from node.places.greeting import serve_greeting
from protocol.errors import TransportDown
from protocol.manifest import SignedManifest
from protocol.rpc import Rpc
from protocol.transport.base import Transport


class SeedPeer:
    def __init__(self, transport: Transport, signed: SignedManifest) -> None:
        self.transport = transport
        self.signed = signed
        self.rpc = Rpc(transport)

    async def start(self) -> None:
        """Listen and greet. Raises `ResourceError` when the port is taken."""
        await self.transport.start()
        serve_greeting(self.rpc, self.transport, self.signed, is_seed=True)
        await self.rpc.start()

    def health(self) -> dict[str, Any]:
        """For whoever asks on this machine: see `node.watch.health`."""
        report = {"peer": self.transport.peer_id, "state": "seed"}
        try:
            return report | {"healthy": True, "addresses": self.transport.addresses()}
        except TransportDown as problem:
            return report | {"healthy": False, "reason": str(problem)}

    async def close(self) -> None:
        await self.rpc.close()
        await self.transport.close()
