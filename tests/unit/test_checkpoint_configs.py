"""config.json as it comes with checkpoints: read as transformers reads it, whatever is left out or renamed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, get_args

import pytest
from transformers import AutoConfig

from bootstrap.export.model_config import FAMILIES, config_of, model_in
from protocol.run.manifest import load_preset
from protocol.run.model import SLIDING, Family, Model
from tests.swarm.micro import micro_manifest
from tests.unit.whole_models import VARIANTS

SIZES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": None}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "sizes alone": {},
    "as many keys as heads": {"num_key_value_heads": None},
    "no head_dim": {"head_dim": None},
    "wide heads": {"head_dim": 64, "num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True, "initializer_range": 0.01, "rms_norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a base of its own": {"rope_theta": 5e5, "rope_scaling": None},
    "new names": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}},
    "old names": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 3e4},
    "yarn without its length": {"rope_scaling": YARN, "max_position_embeddings": 128},
    "llama3 without its length": {"rope_scaling": LLAMA3},
    "a length beside": {"rope_scaling": YARN, "original_max_position_embeddings": 64},
    "no window": {"sliding_window": None},
    "a window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "a window of no layer": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4},
    "an unused window": {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
}


def by_transformers(family: Family, raw: dict[str, Any]) -> Model:
    """The same from its own configuration."""
    config = AutoConfig.for_model(family, **deepcopy(raw))  # which it changes
    window = (getattr(config, "sliding_window", None) or 0) if family in SLIDING else 0
    first = getattr(config, "max_window_layers", 0) if family != "mistral" else 0
    slides = bool(window) and first < config.num_hidden_layers
    rope = {name: value for name, value in config.rope_parameters.items() if value is not None}
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    rope.pop("type", None)
    head_dim = getattr(config, "head_dim", None) or 0
    return Model(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=0 if head_dim * config.num_attention_heads == config.hidden_size else head_dim,
        intermediate_size=config.intermediate_size,
        tied_embeddings=config.tie_word_embeddings,
        attention_bias=getattr(config, "attention_bias", False),
        mlp_bias=getattr(config, "mlp_bias", False),
        sliding_window=window if slides else 0,
        full_layers=first if slides else 0,
        max_positions=config.max_position_embeddings,
        rope_theta=theta,
        rope={"type": kind, **rope},  # type: ignore[arg-type]
        norm_eps=config.rms_norm_eps,
        init_std=config.initializer_range,
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", get_args(Family))
def test_a_configuration_is_read_as_transformers_reads_it(family: Family, name: str) -> None:
    raw = SIZES | CONFIGS[name]
    if family == "mistral" or family == "qwen2":
        raw = {key: value for key, value in raw.items() if "bias" not in key}
    if family == "qwen3":
        raw.pop("mlp_bias", None)
    expected = dict(raw)
    if family in ("mistral", "qwen3"):  # a null of these is an error there
        expected = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
        if raw.get("num_key_value_heads", 1) is None:
            expected["num_key_value_heads"] = raw["num_attention_heads"]
        if raw.get("head_dim", 1) is None:
            expected["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    assert model_in({"model_type": family, **raw}) == by_transformers(family, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_saves_of_an_export_is_read_as_the_run_s_model(variant: str) -> None:
    """Its own config.json has every setting by name, with those that we do not write."""
    own = {"layers": 4, "max_positions": 64, **VARIANTS[variant]}
    manifest = micro_manifest(**{f"model__{name}": value for name, value in own.items()})
    saved = AutoConfig.for_model(**config_of(manifest)).to_dict()
    again = manifest.model_copy(update={"model": model_in(saved)})
    assert config_of(again) == config_of(manifest)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": "512"}, "hidden_size is '512'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"head_dim": "wide"}, "head_dim is 'wide'"),
        ({"rms_norm_eps": "small"}, "norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": [1, 2]}, "rope_parameters are"),
        ({"rope_scaling": {"type": "longrope"}}, "rope.type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types mix"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_a_configuration_must_not_say(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_in({"model_type": "llama", **SIZES, **changes})


def test_every_family_has_its_class() -> None:
    assert set(FAMILIES) == set(get_args(Family))
    assert FAMILIES[load_preset("tiny").model.family] == "LlamaForCausalLM"
