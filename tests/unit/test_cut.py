"""Where stages are cut: no other cut has a faster slowest stage, and what people publish stays as it was."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.model.stage import parameter_count, work_of
from protocol.run.manifest import Manifest, load_preset
from tests.swarm.micro import micro_manifest


def layers_of_stages(manifest: Manifest) -> list[int]:
    return [len(manifest.layers_of(stage)) for stage in range(manifest.stages)]


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Every way to give each stage one layer at least."""
    places = combinations(range(1, layers), stages - 1)
    return [[b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)] for cut in places]


def sizes(manifest: Manifest, counts: list[int]) -> list[int]:
    model = manifest.model
    table = [0] * manifest.stages
    table[0] += model.table_parameters
    table[-1] += 0 if model.tied_embeddings else model.table_parameters
    return [count * model.layer_parameters + beside for count, beside in zip(counts, table, strict=True)]


def works(manifest: Manifest, counts: list[int]) -> list[int]:
    model = manifest.model
    layer = model.layer_parameters + 2 * manifest.data.sequence_tokens * model.heads * model.head_size
    head = [model.table_parameters if s == manifest.head_stage else 0 for s in range(manifest.stages)]
    return [count * layer + beside for count, beside in zip(counts, head, strict=True)]


@given(
    layers=st.integers(1, 9),
    vocabulary=st.integers(256, 4_000),
    is_tied=st.booleans(),
    data=st.data(),
)
def test_no_cut_has_a_faster_slowest_stage_nor_as_fast_a_one_with_less_memory(
    layers: int, vocabulary: int, is_tied: bool, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, layers))
    manifest = micro_manifest(
        model__layers=layers, stages=stages, model__vocab_size=vocabulary, model__tied_embeddings=is_tied
    )
    counts = layers_of_stages(manifest)
    assert sum(counts) == layers
    assert min(counts) >= 1
    costs = {
        tuple(cut): (max(works(manifest, cut)), max(sizes(manifest, cut))) for cut in cuts(layers, stages)
    }
    best = min(costs.values())
    assert costs[tuple(counts)] == best
    alike = [cut for cut, cost in costs.items() if cost == best]
    assert sorted(counts, reverse=True) == min(sorted(cut, reverse=True) for cut in alike), (
        "the most even one"
    )


def test_the_work_of_a_stage_is_what_the_cut_goes_by() -> None:
    manifest = micro_manifest(model__layers=5, stages=3, model__vocab_size=2_000)
    assert [work_of(manifest, stage) for stage in range(3)] == works(manifest, layers_of_stages(manifest))


def test_stages_alike_get_layers_as_evenly_as_they_go_the_first_ones_more() -> None:
    two = micro_manifest(model__layers=5, stages=2)
    assert layers_of_stages(two) == [3, 2]
    three = micro_manifest(model__layers=7, stages=3, model__hidden_size=512, model__intermediate_size=2048)
    assert layers_of_stages(three) == [2, 3, 2]  # the first and the last hold a matrix more


def test_a_large_vocabulary_leaves_its_stage_fewer_layers() -> None:
    untied = micro_manifest(model__layers=12, stages=3, model__vocab_size=1_000)
    tied = micro_manifest(model__layers=12, stages=3, model__vocab_size=1_000, model__tied_embeddings=True)
    assert layers_of_stages(untied) == [5, 6, 1]
    assert layers_of_stages(tied) == [1, 6, 5]


@pytest.mark.parametrize(
    ("preset", "counts"),
    [("tiny", [2, 2]), ("llama-125m", [10, 2]), ("llama-1.3b", [7, 7, 7, 3]), ("llama-6.8b", [7, 9, 9, 7])],
)
def test_the_presets_are_cut_so(preset: str, counts: list[int]) -> None:
    assert layers_of_stages(load_preset(preset)) == counts


@pytest.mark.parametrize(("stages", "straight", "around"), [(1, 0, 0), (2, 1, 2), (3, 2, 3), (4, 3, 4)])
def test_a_ring_is_one_hop_longer(stages: int, straight: int, around: int) -> None:
    for is_tied, hops in ((False, straight), (True, around)):
        manifest = micro_manifest(model__layers=4, stages=stages, model__tied_embeddings=is_tied)
        assert manifest.hops - 1 == hops


def test_the_parts_of_a_cut_are_the_whole_model() -> None:
    for preset in ("llama-125m", "llama-1.3b"):
        manifest = load_preset(preset)
        whole = manifest.model_copy(update={"stages": 1})
        assert sum(parameter_count(manifest, s) for s in range(manifest.stages)) == parameter_count(whole, 0)
