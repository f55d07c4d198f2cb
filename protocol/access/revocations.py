"""The revocations of a run: a list that its owner signs, and that members keep, ask each other for and hand on.

An entry is a token's serial, or the mark of a key: of a peer, or of a delegate whose tokens all end with it. A later
list replaces an earlier one whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import msgpack

from protocol.access.tokens import SERIAL_BYTES
from protocol.errors import RecordError
from protocol.ground import is_time
from protocol.records.identity import Identity, verify

MOST_REVOKED = 1_000  # 14 kB, which a record of the DHT holds
MAX_REVOCATIONS_BYTES = 15 * 1024
_DOMAIN = b"noloco revocations 1:"


def revoked_key(run_id: str) -> str:
    """The DHT key under which the owner's list is kept."""
    return f"noloco/{run_id}/revoked"


def mark_of(public_key: bytes) -> bytes:
    """The mark by which a list of revocations names a key."""
    return hashlib.sha256(public_key).digest()[:SERIAL_BYTES]


@dataclass(frozen=True)
class Revocations:
    """`issued` orders the lists of a run; wall clock of the owner."""

    issued: float = 0.0
    entries: frozenset[bytes] = frozenset()

    def sign(self, run_id: str, owner: Identity) -> bytes:
        body = msgpack.packb([run_id, self.issued, sorted(self.entries)])
        packed: bytes = msgpack.packb([body, owner.sign(_DOMAIN + body)])
        return packed

    @classmethod
    def read(cls, sealed: bytes, run_id: str, owner: bytes) -> Revocations:
        """Read a list.

        Raises `RecordError`, and nothing else, for what the run's `owner` (public key) did not sign.
        """
        if len(sealed) > MAX_REVOCATIONS_BYTES:
            raise RecordError(f"a list of {len(sealed)} bytes")
        try:
            match msgpack.unpackb(sealed, max_array_len=2, max_map_len=0):
                case [bytes(body), bytes(signature)] if verify(owner, _DOMAIN + body, signature):
                    return cls._of(msgpack.unpackb(body, max_array_len=MOST_REVOKED, max_map_len=0), run_id)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise RecordError("not a list of revocations") from error
        raise RecordError("a list of revocations that the run's owner did not sign")

    @classmethod
    def _of(cls, contents: object, run_id: str) -> Revocations:
        match contents:
            case [str(run), float(issued), list(entries), *_] if run == run_id and _are_marks(entries):
                if is_time(issued):
                    return cls(issued, frozenset(entries))
        raise RecordError("a list of revocations of another run, or of no time")


def _are_marks(entries: Collection[object]) -> bool:
    return all(isinstance(entry, bytes) and len(entry) == SERIAL_BYTES for entry in entries)
