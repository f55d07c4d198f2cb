"""Stages: cut anywhere, the same model with the same weights, and it is transformers' Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from node.model.replica import Replica
from node.model.stage import Stage, llama_config, parameter_count, parameter_shapes
from protocol.manifest import Manifest
from tests.swarm.micro import micro_manifest

CUTS = [1, 2, 4]


def manifest_cut(stages: int, **changes: Any) -> Manifest:
    return micro_manifest(stages=stages, model__layers=4, **changes)


def stages_of(manifest: Manifest) -> list[Stage]:
    return [Stage(manifest, index) for index in range(manifest.stages)]


def weights_of(stages: list[Stage]) -> dict[str, torch.Tensor]:
    """All stages' parameters under their names in a checkpoint."""
    named = [(stage.checkpoint_name(name), p) for stage in stages for name, p in stage.named_parameters()]
    assert len(dict(named)) == len(named)
    return {name: parameter.detach() for name, parameter in named}


def logits_of(stages: list[Stage], tokens: torch.Tensor) -> torch.Tensor:
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden)
    return hidden.detach()


def some_tokens(manifest: Manifest) -> torch.Tensor:
    shape = (3, manifest.data.sequence_tokens)
    return torch.randint(0, manifest.model.vocab_size, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("kv_heads", [0, 1])
def test_the_stages_together_are_transformers_llama(stages: int, kv_heads: int) -> None:
    manifest = manifest_cut(stages, model__kv_heads=kv_heads, model__rope_theta=5e5)
    parts = stages_of(manifest)
    weights = weights_of(parts)
    llama = LlamaForCausalLM(llama_config(manifest)).eval()
    assert set(weights) == {name for name, _ in llama.named_parameters()}
    llama.load_state_dict(weights, strict=True)
    tokens = some_tokens(manifest)
    with torch.no_grad():
        expected = llama(tokens).logits
    assert torch.allclose(logits_of(parts, tokens), expected, atol=1e-6, rtol=1e-5)


def test_the_weights_do_not_depend_on_the_cut() -> None:
    whole, *cut = [weights_of(stages_of(manifest_cut(stages))) for stages in CUTS]
    for weights in cut:
        assert set(weights) == set(whole)
        assert all(torch.equal(weights[name], whole[name]) for name in whole)


def test_the_weights_follow_the_seed_and_no_two_matrices_are_alike() -> None:
    one = weights_of(stages_of(manifest_cut(2)))
    other = weights_of(stages_of(manifest_cut(2, model__seed=1)))
    for name in one:
        if one[name].dim() >= 2:
            assert not torch.equal(one[name], other[name])
    key, query = (one[f"model.layers.0.self_attn.{kind}_proj.weight"] for kind in "kq")
    assert not torch.equal(key, query)


def test_the_weights_are_drawn_with_the_manifests_spread() -> None:
    weights = weights_of(stages_of(manifest_cut(1, model__init_std=0.3)))
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.std().item() == pytest.approx(0.3, rel=0.05)
    assert abs(embedding.mean().item()) < 0.02
    assert torch.equal(weights["model.norm.weight"], torch.ones(16))


def test_the_state_of_torchs_own_generator_changes_nothing() -> None:
    torch.manual_seed(1)
    one = Replica(manifest_cut(2), 0).phi
    torch.manual_seed(2)
    assert torch.equal(Replica(manifest_cut(2), 0).phi, one)


@pytest.mark.parametrize("stages", CUTS)
def test_parameters_are_counted_without_making_them(stages: int) -> None:
    manifest = manifest_cut(stages)
    for index, stage in enumerate(stages_of(manifest)):
        assert parameter_count(manifest, index) == sum(p.numel() for p in stage.parameters())
        shapes = {stage.checkpoint_name(name): tuple(p.shape) for name, p in stage.named_parameters()}
        assert parameter_shapes(manifest, index) == shapes


def test_no_token_sees_a_later_one() -> None:
    manifest = manifest_cut(2)
    parts, tokens = stages_of(manifest), some_tokens(manifest)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = logits_of(parts, tokens), logits_of(parts, changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)
