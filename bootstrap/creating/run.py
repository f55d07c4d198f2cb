"""Founding a run: its key, its signed manifest, and the seed peer at whose addresses newcomers find it.

The seed peer greets newcomers, gives them the run's tokenizer and keeps DHT records; it trains nothing.
`noloco-bootstrap` becomes its process until Ctrl-C. Members keep the DHT among themselves, so the run goes on when it
dies, and any member can be joined through.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path

from bootstrap.creating.choosing import kept_tokenizer
from bootstrap.display import writing
from node.machine.processes import on_interrupt
from node.membership.data_source import serve_tokenizer
from node.membership.joining import serve_greeting
from node.watch.health import Report, health_served, parts_told, reached_at
from protocol.errors import StateError
from protocol.identity import Identity
from protocol.manifest import Manifest, load_preset
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

logger = logging.getLogger(__name__)

RUN_KEY = "run.key"
MANIFEST = "manifest.noloco"
SEED_KEY = "seed.key"


@dataclass(frozen=True)
class Founded:
    signed: SignedManifest
    seed_key: Path
    is_new: bool
    tokenizer: bytes | None = None  # the run's tokenizer.json


def found(directory: Path, manifest: Manifest | None, tokenizer: bytes | None = None) -> Founded:
    """Make the run's keys and sign its manifest, or take up the run that `directory` holds already.

    A manifest is immutable: raises `StateError` when the directory holds a run with another one. `tokenizer` is the
    file that the manifest names; it is kept beside the keys.
    """
    signed_path, seed_key = directory / MANIFEST, directory / SEED_KEY
    is_new = not signed_path.exists()
    if is_new:
        key = Identity.load_or_create(directory / RUN_KEY)
        signed = SignedManifest.sign(manifest or load_preset("tiny"), key)
    else:
        try:
            signed = SignedManifest.from_bytes(signed_path.read_bytes())
        except OSError as error:
            raise StateError(f"Cannot read {signed_path} ({error.strerror}).") from None
        if manifest is not None and signed.manifest != manifest:
            raise StateError(
                f"{directory} holds run {signed.run_id} with another manifest, and manifests never change. "
                "Give a new run a directory of its own with --dir."
            )
    kept = kept_tokenizer(directory, signed.manifest, tokenizer)
    if is_new:
        with writing(signed_path, "Choose another --dir."):
            signed_path.write_bytes(signed.to_bytes())
    Identity.load_or_create(seed_key)
    return Founded(signed, seed_key, is_new, kept)


def reach_of(address: str) -> str:
    """Where an address can be reached from: "this machine", "this network" or "everywhere"."""
    parts = address.split("/")
    if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
        host = ipaddress.ip_address(parts[2])
        if host.is_loopback:
            return "this machine"
        if host.is_private or host.is_link_local:
            return "this network"
    return "everywhere"


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

    def health(self) -> Report:
        """The answer to a health check on this machine: see `node.watch.health`."""
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
        _introduce(founded, addresses, address_file)
        async with health_served(founded.seed_key.parent, seed.health):
            await leaving.wait()
        logger.info("The seed peer leaves. The run goes on: newcomers may join through any member.")
    finally:
        await seed.close()


def _introduce(founded: Founded, addresses: list[str], address_file: Path | None) -> None:
    if address_file is not None:
        with writing(address_file, "Choose another --address-file."):
            address_file.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
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
