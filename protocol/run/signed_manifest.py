"""The manifest under its run's Ed25519 signature, as it travels and is kept: canonical msgpack, keys sorted."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgpack

from protocol.errors import LaterVersion, ManifestError
from protocol.files.installation import upgrade_line
from protocol.records.identity import Identity, verify
from protocol.run.earlier_manifests import Missed, as_read_now
from protocol.run.manifest import SIGNED, Manifest, load_toml, manifest_from, unknown_settings
from protocol.version import own_version

MAX_MANIFEST_BYTES = 64 * 1024
_SIGNATURE_DOMAIN = b"noloco-manifest-1:"


class SignedManifest:
    """A manifest with the public key and signature of its run. The run id is the hash of that key."""

    def __init__(
        self,
        manifest: Manifest,
        public_key: bytes,
        signature: bytes,
        body: bytes,
        missed: Missed | None = None,
    ) -> None:
        self.manifest = manifest
        self.missed = missed  # the setting for which this version cannot train what the manifest says
        self.public_key = public_key
        self._signature = signature
        self._body = body
        self.run_id: str = hashlib.sha256(public_key).hexdigest()[:32]

    @classmethod
    def sign(cls, manifest: Manifest, key: Identity) -> SignedManifest:
        body = canonical_bytes(manifest)
        return cls(manifest, key.public_key, key.sign(_SIGNATURE_DOMAIN + body), body)

    @classmethod
    def from_bytes(cls, raw: bytes) -> SignedManifest:
        """Check the signature, then the contents. Raises `ManifestError`."""
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ManifestError(
                f"The manifest has {len(raw):,} bytes; at most {MAX_MANIFEST_BYTES:,} are allowed. "
                "Ask the run's owner for the file again."
            )
        try:
            public_key, body, signature = msgpack.unpackb(raw)
            if not all(isinstance(part, bytes) for part in (public_key, body, signature)):
                raise TypeError("parts must be bytes")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ManifestError(
                "The manifest is not a signed noloco manifest. Ask the run's owner for the file again."
            ) from error
        if not verify(public_key, _SIGNATURE_DOMAIN + body, signature):
            raise ManifestError(
                "The manifest's signature does not match: it was altered or damaged. "
                "Fetch it again from another member, or ask the run's owner."
            )
        try:
            contents = msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise ManifestError(
                "The manifest's contents cannot be read. Ask the run's owner for the file again."
            ) from error
        contents, missed = as_read_now(contents)
        return cls(_read(contents), public_key, signature, body, missed)

    def require_trainable(self) -> None:
        """Raise `ManifestError` if this version cannot train what the manifest says: it is an earlier one's."""
        if self.missed is not None:
            raise ManifestError(
                f"This run trains with {self.missed.setting}, which this version does not have: install the last "
                f"one that does, commit {self.missed.last} of noloco-node, in an environment of its own. The model "
                "can be exported, evaluated and asked with this one."
            )

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb([self.public_key, self._body, self._signature])
        return packed


def load_manifest(path: Path) -> Manifest:
    """Read a manifest from a file: TOML that a person wrote, or a run's signed one. Raises `ManifestError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError:
        raw = b""
    return SignedManifest.from_bytes(raw).manifest if raw.startswith(SIGNED) else load_toml(path)


def _read(contents: object) -> Manifest:
    """The manifest; raises `LaterVersion` for a signed one with settings that this version does not know."""
    try:
        return manifest_from(contents)
    except ManifestError as error:
        unknown = unknown_settings(contents)
        if not unknown:
            raise
        raise LaterVersion(
            f"The run was founded by a later version of noloco-node: its manifest has {', '.join(unknown)}, which "
            f"{own_version() or 'this copy'} does not know. Upgrade: {upgrade_line()}"
        ) from error


def canonical_bytes(manifest: Manifest) -> bytes:
    """Msgpack with sorted keys: the same manifest always gives the same bytes, so signatures are stable."""
    packed: bytes = msgpack.packb(_sorted(manifest.model_dump()))
    return packed


def _sorted(value: object) -> object:
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value
