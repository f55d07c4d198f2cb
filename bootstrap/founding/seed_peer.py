"""The seed peer: a well-known first address. It greets newcomers, gives them the run's tokenizer and keeps DHT
records; it trains nothing.

Members keep the DHT among themselves, so the run goes on when it dies, and any member can be joined through.
"""

from __future__ import annotations

from typing import Any

from node.data.tokenizer_exchange import serve_tokenizer
from node.places.greeting import serve_greeting
from node.watch.health import reached_at
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
from protocol.transport.base import Transport


class SeedPeer:
    def __init__(self, transport: Transport, signed: SignedManifest, tokenizer: bytes | None = None) -> None:
        """`tokenizer` is the run's tokenizer.json, unless bytes are its tokens."""
        self.transport = transport
        self.signed = signed
        self.rpc = Rpc(transport)
        self._tokenizer = tokenizer

    async def start(self) -> None:
        """Listen and greet. Raises `ResourceError` when the port is taken."""
        await self.transport.start()
        serve_greeting(self.rpc, self.transport, self.signed, is_seed=True)
        serve_tokenizer(self.rpc, lambda: self._tokenizer)
        await self.rpc.start()

    def health(self) -> dict[str, Any]:
        """For whoever asks on this machine: see `node.watch.health`."""
        return {"peer": self.transport.peer_id, "state": "seed", **reached_at(self.transport)}

    async def close(self) -> None:
        await self.rpc.close()
        await self.transport.close()
