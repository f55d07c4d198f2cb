"""Stages: cut anywhere, the same model with the same weights."""

from __future__ import annotations

import pytest
import torch

from node.model.execution import Execution
from node.model.replica import Replica
from node.model.stage import parameter_count, parameter_shapes
from protocol.errors import NonFinite
from tests.unit.whole_models import (
    EMBEDDING,
    VARIANTS,
    logits_of,
    manifest_cut,
    some_tokens,
    stages_of,
    weights_of,
)

CUTS = [1, 2, 4]

FIRST_WEIGHTS = {  # of the seed 0, as drawn on an x86 machine
    EMBEDDING: (-0.01587975025177002, -0.009177062660455704, 0.0016283647855743766),
    "model.layers.3.mlp.down_proj.weight": (
        0.002673969604074955,
        0.0005908574094064534,
        0.007913089357316494,
    ),
    "lm_head.weight": (-0.005526096094399691, -0.012795226648449898, 0.0054299673065543175),
}


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_embeddings_save_one_of_the_two_large_matrices(stages: int) -> None:
    """In memory, and in what replicas average: a replica's parameters are all that its rounds exchange."""
    tied, untied = (manifest_cut(stages, model__tied_embeddings=is_tied) for is_tied in (True, False))
    whole = [sum(parameter_count(manifest, stage) for stage in range(stages)) for manifest in (tied, untied)]
    assert whole[1] - whole[0] == untied.model.table_parameters
    held = [stage for stage in range(stages) if EMBEDDING in parameter_shapes(tied, stage)]
    assert held == [0]
    assert not any("lm_head.weight" in parameter_shapes(tied, stage) for stage in range(stages))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_size_of_a_layer_is_known_without_making_one(variant: str) -> None:
    settings = {f"model__{name}": value for name, value in VARIANTS[variant].items()}
    manifest = manifest_cut(1, **settings)
    model = manifest.model
    others = 2 * model.table_parameters + model.hidden_size
    assert parameter_count(manifest, 0) == 4 * model.layer_parameters + others


def test_biases_begin_at_zero_and_gains_at_one() -> None:
    weights = weights_of(stages_of(manifest_cut(1, model__family="qwen2")))
    assert not weights["model.layers.0.self_attn.q_proj.bias"].any()
    assert bool((weights["model.layers.0.input_layernorm.weight"] == 1).all())


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


def test_the_first_weights_are_the_same_on_every_machine() -> None:
    """As one machine has drawn them: a run whose members begin with others would be none."""
    weights = weights_of(stages_of(manifest_cut(2)))
    first = [weights[name].flatten()[:3].tolist() for name in FIRST_WEIGHTS]
    assert first == [pytest.approx(drawn, rel=1e-6) for drawn in FIRST_WEIGHTS.values()]


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


@pytest.mark.parametrize("at_once", [0, 1])
def test_a_loss_that_is_none_leaves_the_gradients_as_they_were(at_once: int) -> None:
    """Also when the sequences are computed one by one and the first ones were sound."""
    replica = Replica(manifest_cut(1), 0)
    replica.passes.execute(Execution(at_once=at_once))
    tokens = some_tokens(replica.manifest)
    replica.passes.last_stage(tokens, tokens)
    before = replica.flat.gradients.clone()
    weights = replica.stage.get_parameter(
        next(n for n, _ in replica.stage.named_parameters() if "embed" in n)
    )
    assert weights.shape[0] == replica.manifest.model.vocab_size
    damaged = tokens.clone()
    damaged[:-1], damaged[-1] = 1, 2
    with torch.no_grad():
        weights[2] = float("nan")
    with pytest.raises(NonFinite):
        replica.passes.last_stage(damaged, tokens)
    assert torch.allclose(replica.flat.gradients, before, atol=1e-6)
