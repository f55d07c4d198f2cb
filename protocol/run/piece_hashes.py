"""The hashes of the pieces of a run's tokenizer.json, under the run's signature.

The manifest has the hash of the whole file, by which a lie shows only at its end. A setting for the pieces would shut
out nodes of earlier versions, so the owner signs their hashes beside the manifest. Members keep the signed list with
the file and give both to newcomers, which refuse a wrong piece when it arrives.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from protocol.errors import RecordError
from protocol.records.identity import Identity, verify

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
TOKENIZER_PIECE_BYTES = 128 * 1024  # of every list that was ever signed, as are the domain and the order
SIGNATURE_BYTES, HASH_BYTES = 64, 32  # of Ed25519, and of SHA-256
MAX_TOKENIZER_HASHES_BYTES = SIGNATURE_BYTES + HASH_BYTES * (MAX_TOKENIZER_BYTES // TOKENIZER_PIECE_BYTES)
_DOMAIN = b"noloco tokenizer pieces 1:"


@dataclass(frozen=True)
class PieceHashes:
    """The SHA-256 of each piece of `TOKENIZER_PIECE_BYTES`, in the order of the file."""

    each: tuple[bytes, ...]

    @staticmethod
    def sign(raw: bytes, tokenizer: str, owner: Identity) -> bytes:
        """Return the sealed list of the file `raw`, which the manifest names `tokenizer`."""
        starts = range(0, len(raw), TOKENIZER_PIECE_BYTES)
        hashes = b"".join(
            hashlib.sha256(raw[start : start + TOKENIZER_PIECE_BYTES]).digest() for start in starts
        )
        return owner.sign(_signed(tokenizer, hashes)) + hashes

    @classmethod
    def read(cls, sealed: bytes, tokenizer: str, owner: bytes) -> PieceHashes:
        """Read a list. Raises `RecordError` for one that the run's `owner` (public key) did not sign for the file."""
        signature, hashes = sealed[:SIGNATURE_BYTES], sealed[SIGNATURE_BYTES:]
        is_whole = (
            len(hashes) > 0 and len(hashes) % HASH_BYTES == 0 and len(sealed) <= MAX_TOKENIZER_HASHES_BYTES
        )
        if not is_whole or not verify(owner, _signed(tokenizer, hashes), signature):
            raise RecordError("hashes of a tokenizer that the run's owner did not sign")
        return cls(tuple(hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)))

    def require(self, index: int, contents: bytes) -> bytes:
        """Return the contents. Raises `RecordError` when they are not piece `index`."""
        if hashlib.sha256(contents).digest() != self.each[index]:
            raise RecordError("a piece of the tokenizer that is not the run's")
        return contents


def _signed(tokenizer: str, hashes: bytes) -> bytes:
    return _DOMAIN + tokenizer.encode() + hashes
