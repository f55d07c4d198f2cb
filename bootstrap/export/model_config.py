"""The run's model in transformers' words: the configuration that an export has, and that checkpoints come with."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from protocol.manifest import Manifest
from protocol.model import Family, Model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# with what the names of the family's classes begin
FAMILIES: dict[Family, str] = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def architecture_of(family: Family) -> str:
    """The class that loads a checkpoint of it."""
    return f"{FAMILIES[family]}ForCausalLM"


@cache
def config_class(family: Family) -> type[PreTrainedConfig]:
    """transformers' class. The first call imports it, a second or two."""
    module = import_module(f"transformers.models.{family}.configuration_{family}")
    found: type[PreTrainedConfig] = getattr(module, f"{FAMILIES[family]}Config")
    return found


def model_config(manifest: Manifest) -> PreTrainedConfig:
    """The configuration of the whole model, as `config.json` of an export holds it."""
    model = manifest.model
    return config_class(model.family)(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        max_position_embeddings=manifest.positions,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": model.rope.type, "rope_theta": model.rope_theta, **model.rope.given()},
        initializer_range=model.init_std,
        tie_word_embeddings=model.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        architectures=[architecture_of(model.family)],
        **_of_the_family(model),
    )


def _of_the_family(model: Model) -> dict[str, object]:
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
    sliding: dict[str, object] = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.full_layers,
    }
    if model.family == "qwen2":  # its configuration has no place for a head_dim, its layers ask for one
        return sliding | ({"head_dim": model.head_dim} if model.head_dim else {})
    return sliding | {"attention_bias": model.attention_bias, "head_dim": model.head_size}
