"""Founding a run: its key, its signed manifest, and the addresses at which newcomers find it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from bootstrap.creating.choosing import kept_tokenizer
from bootstrap.display import writing
from protocol.errors import StateError
from protocol.identity import Identity
from protocol.manifest import Manifest, load_preset
from protocol.signed_manifest import SignedManifest

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
    signed_path, key_path = directory / MANIFEST, directory / RUN_KEY
    if signed_path.exists():
        try:
            signed = SignedManifest.from_bytes(signed_path.read_bytes())
        except OSError as error:
            raise StateError(f"Cannot read {signed_path} ({error.strerror}).") from None
        if manifest is not None and signed.manifest != manifest:
            raise StateError(
                f"{directory} holds run {signed.run_id} with another manifest, and manifests never change. "
                "Give a new run a directory of its own with --dir."
            )
        Identity.load_or_create(directory / SEED_KEY)
        return Founded(
            signed, directory / SEED_KEY, False, kept_tokenizer(directory, signed.manifest, tokenizer)
        )
    key = Identity.load_or_create(key_path)
    signed = SignedManifest.sign(manifest or load_preset("tiny"), key)
    kept = kept_tokenizer(directory, signed.manifest, tokenizer)
    with writing(signed_path, "Choose another --dir."):
        signed_path.write_bytes(signed.to_bytes())
    Identity.load_or_create(directory / SEED_KEY)
    return Founded(signed, directory / SEED_KEY, True, kept)


def reach_of(address: str) -> str:
    """From where an address can be reached: "this machine", "this network" or "everywhere"."""
    parts = address.split("/")
    if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
        host = ipaddress.ip_address(parts[2])
        if host.is_loopback:
            return "this machine"
        if host.is_private or host.is_link_local:
            return "this network"
    return "everywhere"
