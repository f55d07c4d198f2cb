"""The manifest under its run's Ed25519 signature, as it travels and is kept: canonical msgpack, keys sorted."""

from __future__ import annotations

import hashlib

import msgpack

from protocol.errors import ManifestError
from protocol.identity import Identity, verify
from protocol.manifest import Manifest, manifest_from

MAX_MANIFEST_BYTES = 64 * 1024
_SIGNATURE_DOMAIN = b"noloco-manifest-1:"


class SignedManifest:
    """A manifest with the public key and signature of its run. The run id is the hash of that key."""

    def __init__(self, manifest: Manifest, public_key: bytes, signature: bytes, body: bytes) -> None:
        self.manifest = manifest
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
        return cls(manifest_from(contents), public_key, signature, body)

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb([self.public_key, self._body, self._signature])
        return packed


def canonical_bytes(manifest: Manifest) -> bytes:
    """Msgpack with sorted keys: the same manifest always gives the same bytes, so signatures are stable."""
    packed: bytes = msgpack.packb(_sorted(manifest.model_dump()))
    return packed


def _sorted(value: object) -> object:
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value
