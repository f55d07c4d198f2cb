"""Which weights are one history, which of two is the older one, and what earlier versions read and write of it."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ground import PeerId
from protocol.records.announcement import Announcement, open_announcement
from protocol.records.lineage import MOST_BEGINNINGS, SAME_SECONDS, UNDATED, Lineage, together_within
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest, canonical_bytes

LIFETIME = 45.0
BEGUN = 1_700_000_000.0
EARLIER = Path(__file__).parent.parent / "versions" / "69c8df8"

lineages = st.builds(
    Lineage,
    st.sampled_from([0, 1, 2, MOST_BEGINNINGS]),
    st.sampled_from([0.0, 0.001, BEGUN, BEGUN + 80, BEGUN + 1_000]),
)


@pytest.mark.parametrize(
    ("other", "is_same", "is_older"),
    [
        (Lineage(0, BEGUN), True, False),
        (Lineage(0, BEGUN + 90), True, False),
        (Lineage(0, BEGUN + 91), False, False),
        (Lineage(0, BEGUN - 91), False, True),
        (Lineage(0, 0.001), False, True),
        (Lineage(1, BEGUN), False, False),
        (Lineage(1, 0.0), False, False),
        (UNDATED, True, False),
    ],
)
def test_one_history_has_one_number_and_began_at_once(other: Lineage, is_same: bool, is_older: bool) -> None:
    lineage = Lineage(0, BEGUN)
    assert lineage.is_same(other, LIFETIME) == other.is_same(lineage, LIFETIME) == is_same
    assert other.is_before(lineage, LIFETIME) == is_older


@given(one=lineages, other=lineages)
def test_of_two_lineages_that_are_not_one_exactly_one_is_older(one: Lineage, other: Lineage) -> None:
    found = [one.is_same(other, LIFETIME), one.is_before(other, LIFETIME), other.is_before(one, LIFETIME)]
    assert sum(found) == 1


def test_first_replicas_that_cannot_have_seen_each_other_begin_together() -> None:
    assert together_within(6.0) == SAME_SECONDS
    assert together_within(3_600.0) == 7_200.0


def test_joined_lineages_began_when_the_first_of_them_did() -> None:
    assert Lineage(1, BEGUN).joined(Lineage(1, BEGUN - 5)) == Lineage(1, BEGUN - 5)
    assert Lineage(0, BEGUN).joined(UNDATED) == UNDATED.joined(Lineage(0, BEGUN)) == Lineage(0, BEGUN)
    assert UNDATED.joined(UNDATED) == UNDATED


def test_a_stage_that_is_begun_anew_has_a_later_lineage_whatever_anybody_said_before() -> None:
    assert UNDATED.next(BEGUN) == Lineage(1, BEGUN)
    last = Lineage(2**63 - 1, BEGUN)
    Announcement(stage=0, state="serving", since=0.0, beginning=last.next(BEGUN + 1).beginning)
    most = Lineage(MOST_BEGINNINGS, BEGUN)
    assert most.is_before(most.next(BEGUN + 1_000), LIFETIME)


@given(lineage=lineages)
def test_a_checkpoints_facts_are_read_back(lineage: Lineage) -> None:
    assert Lineage.of(lineage.facts()) == lineage


@pytest.mark.parametrize(
    "facts",
    [
        {"beginning": "x"},
        {"begun": "nan"},
        {"begun": "inf"},
        {"begun": "-1"},
        {"beginning": "-1"},
        {"begun": ""},
    ],
)
def test_facts_of_no_lineage_are_told(facts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Lineage.of(facts)


def test_its_name_does_not_depend_on_when_it_began() -> None:
    name = Lineage(1, BEGUN).identity("run", 0)
    assert name == Lineage(1, BEGUN + 5).identity("run", 0)
    assert len({name, Lineage(0).identity("run", 0), Lineage(1).identity("run", 1)}) == 3


# --- earlier versions -----------------------------------------------------------------------------


def test_a_record_of_an_earlier_version_is_of_the_undated_lineage() -> None:
    kept = msgpack.unpackb((EARLIER / "record.msgpack").read_bytes())
    run_id = SignedManifest.from_bytes((EARLIER / "node-1" / "manifest.noloco").read_bytes()).run_id
    _, said = open_announcement(
        run_id, kept["stage"], 0, PeerId(kept["peer"]), kept["sealed"], kept["expires"], kept["expires"] - 1
    )
    assert said.lineage == UNDATED


@pytest.mark.parametrize("preset", ["tiny", "llama-125m"])
def test_a_manifest_that_says_nothing_of_it_is_the_bytes_that_it_was(preset: str) -> None:
    manifest = load_preset(preset)
    assert b"stage_return" not in canonical_bytes(manifest)
    limits = manifest.limits.model_copy(update={"stage_return": 60.0})
    assert b"stage_return" in canonical_bytes(manifest.model_copy(update={"limits": limits}))


def test_the_manifest_of_an_earlier_version_is_the_same_run() -> None:
    raw = (EARLIER / "node-1" / "manifest.noloco").read_bytes()
    signed = SignedManifest.from_bytes(raw)
    assert signed.to_bytes() == raw
