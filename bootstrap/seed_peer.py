"""The seed peer: a well-known first address. It greets newcomers and keeps DHT records; it trains nothing.

Members keep the DHT among themselves, so the run goes on when it dies, and any member can be joined through.
"""

from __future__ import annotations

from typing import Any

from node.places.greeting import serve_greeting
from node.watch.health import reached_at
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
        return {"peer": self.transport.peer_id, "state": "seed", **reached_at(self.transport)}

    async def close(self) -> None:
        await self.rpc.close()
        await self.transport.close()
