"""config.json: the run's model in transformers' words, as exports have it and checkpoints come with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.run.manifest import Manifest
from protocol.run.model import ROPE_MAY, ROPE_NEEDS, SLIDING, Family, Model, RopeType

FAMILIES: dict[Family, str] = {  # and the class that loads a checkpoint of each
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
WINDOWED, FULL = "sliding_attention", "full_attention"  # in layer_types

Config = dict[str, Any]

# what transformers takes where a config.json does not say it
_COMMON: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_OF_FAMILY: dict[Family, Config] = {
    "llama": {"max_position_embeddings": 2_048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4_096},
    "qwen2": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4_096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4_096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
# a null of these says something; of the others it is the family's default, as where the setting is left out
_NULL_SAYS = {"num_key_value_heads", "head_dim", "sliding_window", "rope_scaling", "rope_parameters"}
_SIZE, _NUMBER, _FLAG = (int,), (int, float), (bool,)
_TYPES: dict[str, tuple[type, ...]] = {
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "use_sliding_window": _FLAG,
    "use_cache": _FLAG,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    "sliding_window": _SIZE,
    "max_window_layers": _SIZE,
    "max_position_embeddings": _SIZE,
    "pretraining_tp": _SIZE,
    "bos_token_id": _SIZE,
    "pad_token_id": _SIZE,
    "eos_token_id": (int, list),
    "initializer_range": (float,),
    "rms_norm_eps": (float,),
    "rope_theta": _NUMBER,
    "attention_dropout": _NUMBER,
    "layer_types": (list,),
    "hidden_act": (str,),
    "auto_map": (dict,),
}
_WITH_ORIGINAL_LENGTH: tuple[RopeType, ...] = ("llama3", "yarn")


def config_of(
    manifest: Manifest, dtype: str = "float32", ids: Mapping[str, int | None] | None = None
) -> Config:
    """The config.json of an export, for transformers 4 and 5, which name rotary positions differently.

    `ids` are the tokenizer's special tokens, as `eos_token_id`.
    """
    model = manifest.model
    scaling = {"rope_type": model.rope.type, **model.rope.given()}
    return {
        "model_type": model.family,
        "architectures": [FAMILIES[model.family]],
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "max_position_embeddings": manifest.positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, **scaling},
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope.type == "default" else scaling,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        **_own_words(model),
        **(ids or {}),
    }


def _own_words(model: Model) -> Config:
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
    sliding: Config = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.full_layers,
        "layer_types": _layer_types(model),
    }
    if model.family == "qwen2":  # its configuration has no place for a head_dim, its layers ask for one
        return sliding | ({"head_dim": model.head_dim} if model.head_dim else {})
    return sliding | {"attention_bias": model.attention_bias, "head_dim": model.head_size}


def _layer_types(model: Model) -> list[str]:
    return [WINDOWED if model.slides(layer) else FULL for layer in range(model.layers)]


def model_in(raw: Mapping[str, Any]) -> Model:
    """The [model] section that a config.json of one of the `FAMILIES` describes.

    Raises `ValueError`, of which pydantic's `ValidationError` is one, for a model that stages cannot compute.
    """
    family: Family = raw["model_type"]
    _require_types(raw)
    given = {name: value for name, value in raw.items() if value is not None or name in _NULL_SAYS}
    config: Config = {**_COMMON, **_OF_FAMILY[family], **given}
    if config["hidden_act"] not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act {config['hidden_act']!r}, where only silu is known")
    window, first = _sliding(family, config)
    theta, rope = _rope(config)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    head_dim = 0 if config.get("head_dim") is None else _size(config, "head_dim")
    settings = {
        "family": family,
        "vocab_size": _size(config, "vocab_size"),
        "hidden_size": hidden,
        "layers": _size(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": 0 if head_dim * heads == hidden else head_dim,
        "intermediate_size": _size(config, "intermediate_size"),
        "tied_embeddings": config["tie_word_embeddings"],
        "attention_bias": family in ("llama", "qwen3") and config["attention_bias"],
        "mlp_bias": family == "llama" and config["mlp_bias"],
        "sliding_window": window,
        "full_layers": first,
        "max_positions": config["max_position_embeddings"],
        "rope_theta": theta,
        "rope": rope,
        "norm_eps": config["rms_norm_eps"],
        "init_std": config["initializer_range"] or _COMMON["initializer_range"],  # 0 would begin with nothing
    }
    model = Model.model_validate(settings, strict=True)
    if (kinds := config.get("layer_types")) is not None and kinds != _layer_types(model):
        raise ValueError("layer_types mix full and sliding attention otherwise than first full, then sliding")
    return model


def _require_types(raw: Mapping[str, Any]) -> None:
    """Refuse a setting of a type that transformers refuses, also of those that a model here does without."""
    for name, kinds in _TYPES.items():
        value = raw.get(name)
        if value is not None and type(value) not in kinds:  # True is no number here
            raise ValueError(f"{name} is {str(value)[:40]!r}")
    ends = raw.get("eos_token_id")
    if isinstance(ends, list) and any(type(end) is not int for end in ends):
        raise ValueError(f"eos_token_id is {str(ends)[:40]!r}")
    if not 0 <= (raw.get("initializer_range") or 0.0) <= 1:
        raise ValueError(f"initializer_range is {raw['initializer_range']!r}")


def _size(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"{name} is {value!r}")
    return value


def _sliding(family: Family, config: Config) -> tuple[int, int]:
    """Return (tokens of the sliding window or 0, layers before it)."""
    is_used = family in SLIDING and (family == "mistral" or config.get("use_sliding_window"))
    window = config["sliding_window"] if is_used else 0
    if is_used and window is not None and window <= 0:
        raise ValueError(f"sliding_window is {window}")
    first = 0 if family == "mistral" else config.get("max_window_layers", 0)
    kinds = config.get("layer_types")
    if (
        family != "mistral" and isinstance(kinds, list) and set(kinds) <= {WINDOWED, FULL}
    ):  # it has the last word
        first = kinds.index(WINDOWED) if WINDOWED in kinds else len(kinds)
    return (window, first) if window and first < _size(config, "num_hidden_layers") else (0, 0)


def _rope(config: Config) -> tuple[float, Config]:
    """Return (theta, the manifest's [model.rope])."""
    older_name, newer_name = (config.get(name) for name in ("rope_scaling", "rope_parameters"))
    for given in (older_name, newer_name):
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"rope_parameters are {str(given)[:40]!r}")
    given = older_name or newer_name or {}
    rope = {name: value for name, value in given.items() if value is not None}
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    theta = rope.pop("rope_theta", config["rope_theta"])
    if rope.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not 1")
    if kind in _WITH_ORIGINAL_LENGTH:
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if kind in ROPE_NEEDS:  # transformers passes over all else, as YaRN's "finetuned"
        known = (*ROPE_NEEDS[kind], *ROPE_MAY.get(kind, ()))
        rope = {name: value for name, value in rope.items() if name in known}
    return theta, {"type": kind, **rope}
