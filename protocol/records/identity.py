"""Ed25519 keys: the identity of a peer, and the key that signs a run's manifest.

A libp2p peer id made from an Ed25519 key contains the public key itself, so whatever a peer signs can be
checked by anyone who knows its id and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator

from protocol.errors import RecordError, StateError
from protocol.files.keeping import advice_for, create_whole
from protocol.files.places import read_own
from protocol.ground import PeerId
from protocol.windows import short, window

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# libp2p PublicKey protobuf {type: Ed25519, data: 32 bytes} behind an identity multihash of 36 bytes
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# libp2p PrivateKey protobuf {type: Ed25519, data: 64 bytes (seed, public key)}: the file format of p2pd
_KEY_FILE_PREFIX = bytes.fromhex("08011240")


class Identity:
    """An Ed25519 key pair; on disk in libp2p's own private-key format, which p2pd reads as it is."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public_key: bytes = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @property
    def private_key(self) -> Ed25519PrivateKey:
        return self._key

    @window
    def __repr__(self) -> str:
        return f"Peer: {short(self.peer_id)}"

    @classmethod
    def generate(cls) -> Identity:
        return cls(os.urandom(32))

    @classmethod
    def from_seed(cls, *parts: object) -> Identity:
        """Derive a key from these parts, always the same one, for simulations and tests; never for a real peer."""
        return cls(hashlib.sha256(repr(parts).encode()).digest())

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file. Raises `StateError` when it is missing or damaged."""
        try:
            raw = read_own(path)
        except OSError as error:
            raise StateError(
                f"Cannot read the key file {path} ({error.strerror}). Check its permissions."
            ) from error
        seed = raw[len(_KEY_FILE_PREFIX) : len(_KEY_FILE_PREFIX) + 32]
        if len(seed) != 32 or raw != (identity := cls(seed))._contents():
            raise StateError(
                f"{path} is not an Ed25519 key file, or damaged. Restore it from a copy, or delete it: a new key is "
                "made then, with which this is another peer, or another run."
            )
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        if path.exists():
            return cls.load(path)
        identity = cls.generate()
        identity.save(path)
        return identity

    def save(self, path: Path) -> None:
        """Write the key file, readable by its owner only. Raises `StateError` when that is impossible."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_whole(path, self._contents())
        except OSError as error:
            advice = advice_for(error, "Choose another directory")
            raise StateError(f"Cannot write the key file {path} ({error.strerror}). {advice}.") from error

    def _contents(self) -> bytes:
        return _KEY_FILE_PREFIX + self._seed + self.public_key

    def sign(self, data: bytes) -> bytes:
        """64 bytes, deterministic (RFC 8032)."""
        return self._key.sign(data)


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether `signature` over `data` was made with the key pair of `public_key` (32 bytes)."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> PeerId:
    number = int.from_bytes(_PEER_ID_PREFIX + public_key, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = BASE58[digit] + digits
    return PeerId("1" + digits)  # base58 writes the leading zero byte as '1'


def is_peer_id(text: str) -> bool:
    """Return whether a text is the peer id of an Ed25519 key.

    Takes a microsecond: such ids are of one length and in one range, and base58 keeps the order of numbers.
    """
    return _PEER_ID.fullmatch(text) is not None and _LOWEST <= text <= _HIGHEST


def public_key_of(peer: str) -> bytes:
    """The 32-byte public key inside a peer id. Raises `RecordError` for ids of other key types or garbage."""
    if not is_peer_id(peer):
        raise RecordError(f"not an Ed25519 peer id: {peer[:60]!r}")
    number = 0
    for character in peer:
        number = number * 58 + BASE58.index(character)
    return number.to_bytes(38, "big")[len(_PEER_ID_PREFIX) :]


_PEER_ID = re.compile(f"12D3Koo[{BASE58}]{{45}}")
_LOWEST, _HIGHEST = peer_id_of(bytes(32)), peer_id_of(b"\xff" * 32)


def _peer_id(text: str) -> str:
    if not is_peer_id(text):
        raise ValueError("not a peer id")
    return text


PeerIdText = Annotated[
    str, AfterValidator(_peer_id)
]  # a node may call who is named: else p2pd is asked for nonsense
OptionalPeerId = Annotated[str, AfterValidator(lambda text: text and _peer_id(text))]
