"""Stages: cut anywhere, the same model with the same weights, and it is transformers' own, of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.model.execution import Execution
from node.model.replica import Replica
from node.model.stage import Stage, logits_through, model_config, parameter_count, parameter_shapes, parts_of
from protocol.errors import NonFinite
from protocol.manifest import Manifest
from tests.swarm.micro import micro_manifest

CUTS = [1, 2, 4]
EMBEDDING = "model.embed_tokens.weight"

FIRST_WEIGHTS = {  # of the seed 0, as drawn on an x86 machine
    EMBEDDING: (-0.01587975025177002, -0.009177062660455704, 0.0016283647855743766),
    "model.layers.3.mlp.down_proj.weight": (
        0.002673969604074955,
        0.0005908574094064534,
        0.007913089357316494,
    ),
    "lm_head.weight": (-0.005526096094399691, -0.012795226648449898, 0.0054299673065543175),
}


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
    return logits_through(stages, tokens).detach()


def some_tokens(manifest: Manifest) -> torch.Tensor:
    shape = (3, manifest.data.sequence_tokens)
    return torch.randint(0, manifest.model.vocab_size, shape, generator=torch.Generator().manual_seed(3))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16.0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "grouped queries": {"kv_heads": 1},
    "wide heads": {"head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
    **{rope: {"rope": settings, "max_positions": 16} for rope, settings in ROPES.items()},
    "mistral": {"family": "mistral", "kv_heads": 1},
    "mistral's window": {"family": "mistral", "sliding_window": 7, "head_dim": 10},
    "qwen2": {"family": "qwen2", "kv_heads": 1},
    "qwen2's window": {"family": "qwen2", "sliding_window": 5, "full_layers": 2, "head_dim": 6},
    "qwen3": {"family": "qwen3", "kv_heads": 1, "head_dim": 12},
    "qwen3's window": {"family": "qwen3", "sliding_window": 5, "full_layers": 1, "attention_bias": True},
}


def assert_transformers_computes_the_same(manifest: Manifest) -> None:
    """Its own model of the same configuration has the same parameters, and with these weights the same logits."""
    parts, is_tied = stages_of(manifest), manifest.model.tied_embeddings
    weights = weights_of(parts)
    with torch.no_grad():  # biases begin at zero and gains at one, where confusing them would not be seen
        for parameter in weights.values():
            if parameter.dim() < 2:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 5)
    whole = AutoModelForCausalLM.from_config(model_config(manifest)).eval()
    assert type(whole).__name__ == parts_of(manifest.model.family).architecture
    assert set(weights) == {name for name, _ in whole.named_parameters()}
    whole.load_state_dict(weights | ({"lm_head.weight": weights[EMBEDDING]} if is_tied else {}))
    tokens = some_tokens(manifest)
    with torch.no_grad():
        expected = whole(tokens).logits
    assert torch.allclose(logits_of(parts, tokens), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stages_together_are_transformers_own_model(variant: str, is_tied: bool, stages: int) -> None:
    settings = {f"model__{name}": value for name, value in VARIANTS[variant].items()}
    assert_transformers_computes_the_same(manifest_cut(stages, model__tied_embeddings=is_tied, **settings))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family_takes_every_stretch_of_positions(family: str, rope: str) -> None:
    settings = {"model__family": family, "model__rope": ROPES[rope], "model__max_positions": 16}
    assert_transformers_computes_the_same(manifest_cut(1, **settings))


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
