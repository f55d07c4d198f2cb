"""The common words of protocol/: peer ids, records, and memory that holds bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

# what a number of somebody else's may be at most, so that sums, squares and differences of many are finite and exact
# nats per token, 64 times that of guessing among six million; who has diverged further says this
MOST_LOSS = 1_000.0
MOST_TIME = 1e11  # seconds since the epoch: three thousand years, to 15 microseconds
MOST_COUNT = 10**12  # of what is done one after another: one a millisecond for thirty years
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
