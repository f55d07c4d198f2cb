"""The families of decoders: which of transformers' classes make one, and its whole configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from protocol.manifest import Manifest
from protocol.model import Family, Model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# with what the names of the family's classes begin
FAMILIES: dict[Family, str] = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclass(frozen=True)
class Parts:
    """What a stage is built from."""

    config: type[PreTrainedConfig]
    layer: Any
    norm: Any
    rotary: Any
    architecture: str


@cache
def parts_of(family: Family) -> Parts:
    """transformers' classes. The first call imports them, a second or two that only those pay who build a stage."""
    name, package = FAMILIES[family], f"transformers.models.{family}"
    configuration = import_module(f"{package}.configuration_{family}")
    modeling = import_module(f"{package}.modeling_{family}")
    return Parts(
        getattr(configuration, f"{name}Config"),
        getattr(modeling, f"{name}DecoderLayer"),
        getattr(modeling, f"{name}RMSNorm"),
        getattr(modeling, f"{name}RotaryEmbedding"),
        f"{name}ForCausalLM",
    )


def model_config(manifest: Manifest) -> PreTrainedConfig:
    """The configuration of the whole model, as `config.json` of an export holds it."""
    model = manifest.model
    parts = parts_of(model.family)
    return parts.config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        max_position_embeddings=model.max_positions or manifest.data.sequence_tokens,
        rms_norm_eps=model.norm_eps,
        rope_parameters=_rope_parameters(model),
        initializer_range=model.init_std,
        tie_word_embeddings=model.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        architectures=[parts.architecture],
        **_of_the_family(model),
    )


def _rope_parameters(model: Model) -> dict[str, Any]:
    return {"rope_type": model.rope.type, "rope_theta": model.rope_theta, **model.rope.given()}


def _of_the_family(model: Model) -> dict[str, Any]:
    """The settings that not all families know."""
    window = model.sliding_window or None
    if model.family == "llama":
        return {
            "attention_bias": model.attention_bias,
            "mlp_bias": model.mlp_bias,
            "head_dim": model.head_size,
        }
    if model.family == "mistral":
        return {"sliding_window": window, "head_dim": model.head_size}
    sliding = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.full_layers,
    }
    if model.family == "qwen2":  # its configuration has no place for a head_dim, its layers ask for one
        return sliding | ({"head_dim": model.head_dim} if model.head_dim else {})
    return sliding | {"attention_bias": model.attention_bias, "head_dim": model.head_size}
