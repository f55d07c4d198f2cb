"""The common words of protocol/: peer ids, bounds on numbers, records, and memory that holds bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NewType, TypeAlias

from pydantic import Field

# what a number of somebody else's may be at most, so that sums, squares and differences of many are finite and exact
# nats per token, 64 times that of guessing among six million; who has diverged further says this
MOST_LOSS = 1_000.0
MOST_TIME = 1e11  # seconds since the epoch: three thousand years, to 15 microseconds
MOST_COUNT = 10**12  # of what is done one after another: one a millisecond for thirty years
PeerId = NewType("PeerId", str)  # base58 libp2p peer id; holds the peer's Ed25519 public key
Buffer: TypeAlias = bytes | bytearray | memoryview
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]  # of what is done one after another
Time = Annotated[float, Field(ge=0, le=MOST_TIME, allow_inf_nan=False)]  # wall clock, seconds since the epoch


def is_time(seconds: float) -> bool:
    """Return whether a number that somebody signed is a `Time`; NaN is none."""
    return 0 <= seconds <= MOST_TIME


@dataclass(frozen=True)
class Record:
    """One peer's signed entry under a DHT key, already checked by `protocol.records.records.open_record`."""

    subkey: PeerId  # who signed it
    value: bytes  # the signed payload, without its envelope
    expires: float  # wall-clock seconds since the epoch
    credential: bytes = b""  # by which its signer may be in the run, unchecked
    sealed: bytes = field(default=b"", repr=False, compare=False)  # as it was stored, to be shown to others
