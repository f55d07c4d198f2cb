"""The owner's plan: what is signed is what is read, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RecordError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.run.placement_plan import (
    LONGEST,
    MAX_PLAN_BYTES,
    MOST_PLANNED,
    PlacementPlan,
    mark_of,
    open_plan,
)

OWNER, OTHER = Identity.from_seed("owner"), Identity.from_seed("somebody else")
RUN = "r" * 32
NOW = 1_000_000.0
PEERS = [PeerId(f"peer {n}") for n in range(6)]


def plan(stages: Any = (PEERS[:2], PEERS[2:5]), seconds: float = 600.0) -> PlacementPlan:
    return PlacementPlan.of(RUN, stages, NOW, seconds)


def opened(sealed: bytes, now: float = NOW, run: str = RUN) -> PlacementPlan:
    return open_plan(sealed, OWNER.public_key, run, now)


def test_a_plan_tells_each_peer_its_stage() -> None:
    found = opened(plan().sign(OWNER))
    assert found == plan()
    assert found.places(PEERS) == {PEERS[0]: 0, PEERS[1]: 0, PEERS[2]: 1, PEERS[3]: 1, PEERS[4]: 1}


def test_a_plan_of_as_many_as_the_planner_takes_fits_a_record() -> None:
    many = [PeerId(f"peer {n}") for n in range(MOST_PLANNED)]
    assert len(plan([many[:500], many[500:]]).sign(OWNER)) <= MAX_PLAN_BYTES
    with pytest.raises(RecordError, match="1025 peers"):
        plan([many[:500], [*many[500:], PeerId("one more")]])


@pytest.mark.parametrize(
    ("sealed", "now", "run", "said"),
    [
        (plan().sign(OTHER), NOW, RUN, "not signed"),
        (plan().sign(OWNER), NOW + 601, RUN, "over"),
        (plan().sign(OWNER), NOW - 60, RUN, "future"),
        (plan().sign(OWNER), NOW, "s" * 32, "another run"),
        (plan().sign(OWNER)[:-1], NOW, RUN, "malformed"),
        (msgpack.packb([plan().sign(OWNER)]), NOW, RUN, "malformed"),
        (b"", NOW, RUN, "malformed"),
        (b"x" * (MAX_PLAN_BYTES + 1), NOW, RUN, "bytes"),
    ],
)
def test_what_is_forged_stale_or_malformed_is_refused(sealed: bytes, now: float, run: str, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        opened(sealed, now, run)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": [mark_of(PEERS[0]), mark_of(PEERS[0])]},
        {"stages": [b"short"]},
        {"stages": [b""] * 1025},
        {"expires": NOW + LONGEST + 1},
        {"expires": NOW},
        {"issued": float("nan")},
        {"issued": -1e308, "expires": -1e308},
        {"issued": -10.0, "expires": 10.0},
        {"issued": 1e308, "expires": 1e308},
        {"expires": float("inf")},
        {"stages": 7},
    ],
)
def test_what_the_owner_signs_is_checked_as_well(changes: dict[str, Any]) -> None:
    body = msgpack.packb({**plan().model_dump(), **changes})
    sealed = msgpack.packb([body, OWNER.sign(b"noloco-placement-plan-1:" + body)])
    with pytest.raises(RecordError):
        opened(sealed)


@given(place=st.integers(0, 10_000), value=st.integers(1, 255))
def test_no_byte_can_be_altered(place: int, value: int) -> None:
    sealed = bytearray(plan().sign(OWNER))
    sealed[place % len(sealed)] ^= value
    with pytest.raises(RecordError):
        opened(bytes(sealed))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_the_same_error(sealed: bytes) -> None:
    with pytest.raises(RecordError):
        opened(sealed)
