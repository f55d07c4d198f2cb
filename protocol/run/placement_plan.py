"""The plan of a run's owner: which peer should serve which stage. Signed, bounded and over after a while.

The signature is the run's own, inside the record: whoever holds a plan may pass it on in a record of its own, and
the owner's key need not be on the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import RecordError
from protocol.ground import PeerId, is_time
from protocol.records.announcement import Number
from protocol.records.identity import Identity, verify
from protocol.records.records import CLOCK_SLACK

MOST_PLANNED = 1024  # peers: 8 KiB of a record
LONGEST = 24 * 3600.0  # seconds: links and volunteers change
MARK_BYTES = 8  # of a peer: the odds that two of a thousand have the same are 3 in 10¹⁴
MAX_PLAN_BYTES = 12 * 1024

_DOMAIN = b"noloco-placement-plan-1:"

Marks = Annotated[bytes, Field(max_length=MOST_PLANNED * MARK_BYTES)]


class PlacementPlan(BaseModel):
    """`stages`: for each, the marks of its peers in a row. Times in seconds since the epoch.

    `begin_anew`: the stages that need not wait for their state to come back; earlier versions do not know it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: Annotated[str, Field(min_length=32, max_length=32)]
    issued: Number
    expires: Number
    stages: Annotated[list[Marks], Field(max_length=1_024)]
    begin_anew: Annotated[list[Annotated[int, Field(ge=0, lt=1_024)]], Field(max_length=1_024)] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _is_one_place_for_each(self) -> Self:
        if any(len(marks) % MARK_BYTES for marks in self.stages):
            raise ValueError("marks are cut short")
        marks = [mark for stage in self.stages for mark in split(stage)]
        if len(marks) > MOST_PLANNED:
            raise ValueError(f"{len(marks)} peers; {MOST_PLANNED} are allowed")
        if len(set(marks)) < len(marks):
            raise ValueError("a peer has two places")
        if not (is_time(self.issued) and 0 < self.expires - self.issued <= LONGEST):
            raise ValueError(f"a plan holds for {LONGEST:.0f} s at most")
        return self

    @classmethod
    def of(
        cls,
        run_id: str,
        stages: Sequence[Sequence[PeerId]],
        issued: float,
        seconds: float,
        begin_anew: Sequence[int] = (),
    ) -> PlacementPlan:
        """Make a plan of these places. Raises `RecordError` when they do not make a valid one."""
        marks = [b"".join(mark_of(peer) for peer in peers) for peers in stages]
        try:
            return cls(
                run_id=run_id,
                issued=issued,
                expires=issued + seconds,
                stages=marks,
                begin_anew=list(begin_anew),
            )
        except ValidationError as error:
            raise RecordError(f"not a plan: {error.errors()[0]['msg']}") from None

    def places(self, peers: Sequence[PeerId]) -> Mapping[PeerId, int]:
        """The stages of those among the peers that the plan names."""
        stage_of = {mark: stage for stage, marks in enumerate(self.stages) for mark in split(marks)}
        marks = {peer: mark_of(peer) for peer in peers}
        return {peer: stage_of[mark] for peer, mark in marks.items() if mark in stage_of}

    def sign(self, key: Identity) -> bytes:
        """Sign the plan with the key of the run."""
        left_out = set() if self.begin_anew else {"begin_anew"}
        body: bytes = msgpack.packb(self.model_dump(exclude=left_out))
        sealed: bytes = msgpack.packb([body, key.sign(_DOMAIN + body)])
        return sealed


def open_plan(sealed: bytes, public_key: bytes, run_id: str, now: float) -> PlacementPlan:
    """Open a plan that the run's owner signed for this run and that holds now. Raises `RecordError` for all else."""
    if len(sealed) > MAX_PLAN_BYTES:
        raise RecordError(f"the plan has {len(sealed)} bytes; {MAX_PLAN_BYTES} are allowed")
    try:
        body, signature = msgpack.unpackb(sealed)
        is_of_bytes = isinstance(body, bytes) and isinstance(signature, bytes)
        if not is_of_bytes or not verify(public_key, _DOMAIN + body, signature):
            raise RecordError("the plan is not signed by the run's owner")
        plan = PlacementPlan.model_validate(msgpack.unpackb(body))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("the plan is malformed") from error
    if plan.run_id != run_id:
        raise RecordError("the plan is of another run")
    if plan.issued > now + CLOCK_SLACK:
        raise RecordError("the plan is from the future")
    if plan.expires <= now:
        raise RecordError("the plan is over")
    return plan


def mark_of(peer: PeerId) -> bytes:
    return blake2b(peer.encode(), digest_size=MARK_BYTES).digest()


def split(marks: bytes) -> list[bytes]:
    return [marks[i : i + MARK_BYTES] for i in range(0, len(marks), MARK_BYTES)]


def plan_key(run_id: str) -> str:
    """The DHT key under which copies of the plan are kept."""
    return f"noloco/{run_id}/plan"
