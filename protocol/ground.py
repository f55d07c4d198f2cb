"""The common words of protocol/: peer ids, records, and memory that holds bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType, TypeAlias

PeerId = NewType("PeerId", str)  # base58 libp2p peer id; holds the peer's Ed25519 public key
Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Record:
    """One peer's signed entry under a DHT key, already checked by `protocol.records.open_record`."""

    subkey: PeerId  # who signed it
    value: bytes  # the signed payload, without its envelope
    expires: float  # wall-clock seconds since the epoch
    credential: bytes = b""  # by which its signer may be in the run, unchecked
    sealed: bytes = field(default=b"", repr=False, compare=False)  # as it was stored, to be shown to others
