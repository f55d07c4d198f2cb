"""All stages of a small model in one process, and transformers' own model of the same configuration and weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bootstrap.export.model_config import FAMILIES
from node.model.stage import Stage, logits_through
from protocol.run.manifest import Manifest
from tests.pretrained import transformers_config
from tests.swarm.micro import micro_manifest

EMBEDDING = "model.embed_tokens.weight"


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


def transformers_model(parts: list[Stage], manifest: Manifest) -> PreTrainedModel:
    """Its own model of the manifest, with the weights of `parts`, whose gains and biases are drawn anew.

    They begin at one and zero, where confusing them would not be seen.
    """
    weights = weights_of(parts)
    with torch.no_grad():
        for parameter in weights.values():
            if parameter.dim() < 2:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 5)
    whole = AutoModelForCausalLM.from_config(transformers_config(manifest)).eval()
    assert type(whole).__name__ == FAMILIES[manifest.model.family]
    assert set(weights) == {name for name, _ in whole.named_parameters()}
    is_tied = manifest.model.tied_embeddings
    whole.load_state_dict(weights | ({"lm_head.weight": weights[EMBEDDING]} if is_tied else {}))
    return whole
