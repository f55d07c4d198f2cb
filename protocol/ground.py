"""The common words of protocol/: peer ids, records, and memory that holds bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

PeerId = NewType("PeerId", str)  # base58 libp2p peer id; holds the peer's Ed25519 public key
Buffer: TypeAlias = bytes | bytearray | memoryview


def is_time(seconds: float) -> bool:
    """Return whether a wall clock that somebody signed is one: NaN is before and after every other, or neither."""
    return math.isfinite(seconds) and seconds >= 0


@dataclass(frozen=True)
class Record:
    """One peer's signed entry under a DHT key, already checked by `protocol.records.open_record`."""

    subkey: PeerId  # who signed it
    value: bytes  # the signed payload, without its envelope
    expires: float  # wall-clock seconds since the epoch
    credential: bytes = b""  # by which its signer may be in the run, unchecked
    sealed: bytes = field(default=b"", repr=False, compare=False)  # as it was stored, to be shown to others
