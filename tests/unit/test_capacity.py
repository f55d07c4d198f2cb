"""What a node says it could do, and what its stage costs."""

from __future__ import annotations

import msgpack
import pytest

from node.context import LEAST_MARKS, Throughput
from node.model.stage import work_of
from protocol.errors import RecordError
from protocol.ground import PeerId, Record
from protocol.records.announcement import Announcement, Claim
from tests.swarm.micro import micro_manifest


def test_capacity_is_of_the_time_that_was_computed_not_of_the_time_that_passed() -> None:
    throughput = Throughput()
    for step in range(LEAST_MARKS):
        assert throughput.capacity() is None
        throughput.mark(now=100.0 * step, computing=2.0 * step)  # 2 of 100 seconds for 8 microbatches
        throughput.microbatches += 8
    assert throughput.capacity() == pytest.approx(4.0)


def test_a_node_that_never_computed_tells_no_capacity() -> None:
    throughput = Throughput()
    for step in range(5):
        throughput.mark(now=float(step))
    assert throughput.capacity() is None


def test_the_work_of_a_stage_is_its_layers_and_the_head_but_not_the_table_of_the_first() -> None:
    manifest = micro_manifest(stages=3, model__layers=4)
    hidden, inner, tokens = 16, 32, 32
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden + 2 * tokens * hidden
    head = manifest.model.vocab_size * hidden
    assert [len(manifest.layers_of(stage)) for stage in range(3)] == [1, 2, 1]
    assert [work_of(manifest, stage) for stage in range(3)] == [layer, 2 * layer, layer + head]


def test_with_tied_embeddings_the_head_is_work_of_the_first_stage() -> None:
    manifest = micro_manifest(stages=2, model__tied_embeddings=True)
    head = manifest.model.vocab_size * manifest.model.hidden_size
    assert work_of(manifest, 0) == work_of(manifest, 1) + head


def test_a_record_of_an_older_version_has_no_capacity_and_stays_where_it_is() -> None:
    old = {"stage": 1, "state": "serving", "since": 5.0}
    said = Announcement.read(Record(PeerId("p"), msgpack.packb(old), 10.0))
    assert (said.capacity, said.may_serve) == (None, [])


def test_records_say_what_was_put_into_them() -> None:
    said = Announcement(stage=1, state="serving", since=5.0, capacity=0.5, may_serve=[0, 2])
    assert Announcement.read(Record(PeerId("p"), said.to_bytes(), 10.0)) == said
    claim = Claim(since=5.0, source=1, target=2)
    assert Claim.read(Record(PeerId("p"), claim.to_bytes(), 10.0)) == claim


@pytest.mark.parametrize("value", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"since": "now"})])
def test_a_malformed_claim_is_an_error_of_ours(value: bytes) -> None:
    with pytest.raises(RecordError):
        Claim.read(Record(PeerId("p"), value, 10.0))
