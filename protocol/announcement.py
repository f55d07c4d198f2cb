"""What a peer says of itself in the DHT, and under which keys. Signed and expiring: see `protocol.records`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import RecordError
from protocol.link_report import PublishedLinks
from protocol.transport.base import PeerId, Record

State = Literal["joining", "serving", "finished", "leaving"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]


class Announcement(BaseModel):
    """A node's record. Readers get enough to route to it, to pair with it and to show it to people."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later version may say more

    stage: Natural
    state: State
    since: Number  # wall clock at which the node joined, seconds since the epoch
    step: Natural = 0
    round: Natural = 0
    loss: Number | None = None
    tokens_per_second: Number = 0.0
    addresses: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=8)] = []
    links: PublishedLinks = []  # measured lately, from this node to others

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb(self.model_dump())
        return packed


def stage_key(run_id: str, stage: int) -> str:
    """The DHT key under which the replicas of `stage` announce themselves."""
    return f"noloco/{run_id}/stage/{stage}"


def joining_key(run_id: str) -> str:
    """The DHT key under which newcomers say that they are choosing a stage."""
    return f"noloco/{run_id}/joining"


def parse_announcement(record: Record) -> tuple[PeerId, Announcement]:
    """Raises `RecordError` when the signed contents are not an announcement."""
    try:
        return record.subkey, Announcement.model_validate(msgpack.unpackb(record.value))
    except (ValueError, ValidationError, msgpack.UnpackException) as error:
        raise RecordError(f"malformed announcement of {record.subkey}") from error
