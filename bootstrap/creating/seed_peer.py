"""The seed peer: a well-known first address. It greets newcomers, gives them the run's tokenizer and keeps DHT
records; it trains nothing.

Members keep the DHT among themselves, so the run goes on when it dies, and any member can be joined through.
"""

from __future__ import annotations

import asyncio
from typing import Any

from node.membership.greeting import serve_greeting
from node.membership.tokenizer_exchange import serve_tokenizer
from node.watch.health import parts_told, reached_at
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport


class SeedPeer:
    def __init__(self, transport: Transport, signed: SignedManifest, tokenizer: bytes | None = None) -> None:
        """`tokenizer` is the run's tokenizer.json, unless bytes are its tokens."""
        self.transport = transport
        self.signed = signed
        self._supervisor = Supervisor()
        transport.supervise(self._supervisor.group())
        self.rpc = Rpc(transport, supervisor=self._supervisor.group())
        self._tokenizer = tokenizer

    async def start(self) -> None:
        """Listen and greet. Raises `ResourceError` when the port is taken."""
        await self.transport.start()
        serve_greeting(self.rpc, self.transport, self.signed, is_seed=True)
        serve_tokenizer(self.rpc, lambda: self._tokenizer)
        await self.rpc.start()

    def health(self) -> dict[str, Any]:
        """For whoever asks on this machine: see `node.watch.health`."""
        parts = parts_told(self._supervisor, asyncio.get_running_loop().time())
        return {"peer": self.transport.peer_id, "state": "seed", "parts": parts, **reached_at(self.transport)}

    async def close(self) -> None:
        await self.rpc.close()
        await self.transport.close()
