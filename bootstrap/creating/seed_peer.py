"""The seed peer: a well-known first address. It greets newcomers, gives them the run's tokenizer and keeps DHT
records; it trains nothing. `noloco-bootstrap` becomes its process until Ctrl-C.

Members keep the DHT among themselves, so the run goes on when it dies, and any member can be joined through.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from bootstrap.creating.run import Founded, reach_of
from bootstrap.display import writing
from node.machine.processes import on_interrupt
from node.membership.joining import serve_greeting
from node.membership.tokenizer_exchange import serve_tokenizer
from node.watch.health import health_served, parts_told, reached_at
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

logger = logging.getLogger(__name__)


class SeedPeer:
    """A peer that keeps DHT records and greets; what is in flight belongs to its supervisor."""

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


async def keep_seed_peer(founded: Founded, config: Libp2pConfig, address_file: Path | None) -> None:
    """Run the seed peer until it is told to leave. Raises `ResourceError` when the port is taken."""
    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    seed = SeedPeer(Libp2pTransport(founded.seed_key, config), founded.signed, founded.tokenizer)
    try:
        await seed.start()
        addresses = seed.transport.addresses()
        if address_file is not None:
            _write_addresses(address_file, addresses)
        _introduce(founded, addresses)
        async with health_served(founded.seed_key.parent, seed.health):
            await leaving.wait()
        logger.info("The seed peer leaves. The run goes on: newcomers may join through any member.")
    finally:
        await seed.close()


def _write_addresses(file: Path, addresses: list[str]) -> None:
    with writing(file, "Choose another --address-file."):
        file.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")


def _introduce(founded: Founded, addresses: list[str]) -> None:
    manifest = founded.signed.manifest
    doing = "Founded" if founded.is_new else "Taking up"
    print(
        f"{doing} run '{manifest.name}', id {founded.signed.run_id}: "
        f"{manifest.stages} stages, {manifest.model.layers} layers of width {manifest.model.hidden_size}."
    )
    print("Volunteers join with one of these, each in a directory of its own or with --state-dir:")
    for address in addresses:
        print(f"  from {reach_of(address)}:")
        print(f"    noloco-node --join {address}")
    if manifest.start is not None:
        print(
            f"The run starts from '{manifest.start.name}': give the first replica of each stage --from-checkpoint "
            "DIRECTORY, too. Later ones get the weights from it."
        )
    print("Ctrl-C stops the seed peer; the run goes on among its members.", flush=True)
