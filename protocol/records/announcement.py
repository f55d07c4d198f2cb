"""Announcements of a peer about itself and its links in the DHT, and the keys they are under.

Announcements are signed and expire: see `protocol.records.records`.

A small stage has one key, which everybody reads whole. A large one has 2^level keys more, its buckets, and each of
its replicas writes to the one that its peer id falls into; under the stage's own key is then a random sample of them,
from which readers learn the level. So what one reads and what a holder of a key keeps does not grow with the swarm.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, NamedTuple, Self

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from protocol.errors import RecordError
from protocol.ground import Count, Natural, PeerId, Record
from protocol.records.forgiving import open_ended, otherwise
from protocol.records.identity import BASE58
from protocol.records.lineage import Lineage
from protocol.records.records import key_digest, open_record

PEER_CHARACTERS = 16  # the end of a peer id: 93 bits of its key, too many to look for one that ends alike
MOST_PUBLISHED = 8  # links in a record, of some 45 bytes each
MOST_TOLD = 64  # links told to whoever asks
MOST_LEVEL = 20  # a million buckets
AT_LEAST = 1.0  # an uncertainty of this or more: the link is at least as fast as is said

STATES = "joining", "serving", "finished", "leaving"
State = Literal["joining", "serving", "finished", "leaving"]
Number = Annotated[float, Field(allow_inf_nan=False)]
MOST_FIGURE = 1e15  # sums, squares and ratios of such numbers are finite, and they fit a line
# what a node says of itself, times too: what is larger counts as that
Figure = Annotated[Number, AfterValidator(lambda number: max(-MOST_FIGURE, min(number, MOST_FIGURE)))]
WholeId = Annotated[str, Field(pattern=f"^12D3Koo[{BASE58}]{{45}}$")]
PeerEnd = Annotated[str, Field(pattern=f"^[{BASE58}]{{{PEER_CHARACTERS}}}$")]
Feature = Annotated[str, Field(max_length=32)]
RoundTrip = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Uncertainty = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


@open_ended
class LinkReport(NamedTuple):
    """One direction: from the node that says it to `peer`. Travels as an array."""

    peer: PeerEnd
    round_trip: RoundTrip  # seconds, of a small message and its answer
    bandwidth: Bandwidth | None = None  # bytes per second; None: not measured
    uncertainty: Uncertainty = 0.0  # standard deviation of the bandwidth's logarithm


PublishedLinks = Annotated[list[LinkReport], Field(max_length=MOST_PUBLISHED)]
ToldLinks = Annotated[list[LinkReport], Field(max_length=MOST_TOLD)]


class Entry(BaseModel):
    """The contents of a record's value, as msgpack."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later version may say more

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb(self.model_dump(exclude_defaults=True))
        return packed

    @classmethod
    def read(cls, record: Record) -> Self:
        """Read a record's value. Raises `RecordError` when the signed contents are something else."""
        try:
            return cls.model_validate(msgpack.unpackb(record.value))
        except (ValueError, msgpack.UnpackException) as error:
            raise RecordError(f"malformed {cls.__name__.lower()} of {record.subkey}") from error


class Announcement(Entry):
    """A node's record. Readers get enough to route to it, to pair with it and to show it to people."""

    stage: Natural
    state: Annotated[State, otherwise("joining", *STATES)]
    since: Figure  # wall clock at which the node came to this stage, seconds since the epoch
    step: Count = 0
    round: Count = 0
    loss: Figure | None = None
    tokens_per_second: Figure = 0.0
    capacity: Annotated[Figure, Field(ge=0)] | None = None  # microbatches per second, were it never to wait
    may_serve: Annotated[list[Natural], Field(max_length=1_024)] = []  # stages that it would move to
    addresses: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=8)] = []
    name: Annotated[str, Field(max_length=32)] = ""  # what its volunteer calls it
    links: PublishedLinks = []  # measured lately, from this node to others
    level: Annotated[int, Field(ge=0, le=MOST_LEVEL)] = 0  # this record is in one of 2^level buckets
    # the peers that pass streams on to this node, which nobody can dial; itself where it has found none
    through: Annotated[list[WholeId], Field(max_length=4)] = []
    beginning: Natural = 0  # of its lineage, see `protocol.records.lineage`, and when that began
    begun: Annotated[Figure, Field(ge=0)] = 0.0
    # of the node's program, see `protocol.rpc.compatibility`: versions before these fields were speak protocol 1.0
    protocol: Natural = 1
    minor: Natural = 0
    features: Annotated[list[Feature], Field(max_length=64)] = []
    program: Annotated[str, Field(max_length=64)] = ""

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.beginning, self.begun)


def open_announcement(
    run_id: str, stage: int, level: int, peer: PeerId, sealed: bytes, expires: float, now: float
) -> tuple[Record, Announcement]:
    """Open a replica's record that a peer has shown, sealed for its place among those of `stage` at this level.

    Raises `RecordError` for bytes that `peer` did not sign for that place and time, or that are not of that stage.
    """
    record = open_record(key_digest(record_key(run_id, stage, peer, level)), peer, sealed, expires, now)
    announcement = Announcement.read(record)
    if announcement.stage != stage:
        raise RecordError("the record is of another stage")
    return record, announcement


class Claim(Entry):
    """A peer's lease to move. The earliest one holds while it stands, and nobody else begins to."""

    since: Figure  # wall clock at which the peer claimed it
    source: Natural
    target: Natural
    withdrawn: bool = False  # a record cannot be taken back before it expires


def stage_key(run_id: str, stage: int) -> str:
    """The DHT key under which all replicas of a small `stage` announce themselves, and a sample of a large one's."""
    return f"noloco/{run_id}/stage/{stage}"


def bucket_key(run_id: str, stage: int, level: int, bucket: int) -> str:
    """The DHT key of one of a stage's 2^level buckets; the only one of level 0 is the stage's own key."""
    return f"{stage_key(run_id, stage)}/{level}.{bucket}" if level else stage_key(run_id, stage)


def record_key(run_id: str, stage: int, peer: str, level: int) -> str:
    """The DHT key under which `peer` announces itself."""
    return bucket_key(run_id, stage, level, _spread(peer) >> (64 - level))


def is_sampled(peer: str, level: int) -> bool:
    """Return whether the peer announces itself under its stage's own key, too: one in 2^level does."""
    return _spread(peer) & 0xFFFF_FFFF < 1 << (32 - level)


def _spread(peer: str) -> int:
    """64 random bits that follow from the peer's id."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8])


def joining_key(run_id: str) -> str:
    """The DHT key under which newcomers say that they are choosing a stage."""
    return f"noloco/{run_id}/joining"


def moving_key(run_id: str) -> str:
    """The DHT key under which a peer says that it is about to move to another stage."""
    return f"noloco/{run_id}/moving"
