"""From a Hugging Face checkpoint to what the manifest says of it: the [model] and [start] sections."""

from __future__ import annotations

import logging
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError

from node.model.pretrained import CONFIG, Pretrained, stage_digest
from node.model.stage import FAMILIES, parts_of
from protocol.errors import CheckpointError
from protocol.manifest import Manifest, Start
from protocol.model import Model

logger = logging.getLogger(__name__)

MAX_LAYERS = 1_024  # as in the manifest
UNKNOWN_DIGEST = "0" * 64


def model_of(source: Pretrained) -> Model:
    """The [model] section for config.json. Raises `CheckpointError` for what cannot be trained here."""
    raw = source.config()
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{source.source} is a model of the type {family!r}. Those that can be trained here are: "
            f"{', '.join(FAMILIES)}."
        )
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{source.source} is quantized, and such weights cannot be trained. Use the model that it was made from."
        )
    layers = raw.get("num_hidden_layers", 0)
    try:
        if not isinstance(layers, int) or layers > MAX_LAYERS:  # transformers makes lists of as many
            raise ValueError(f"num_hidden_layers is {layers!r}")
        config = parts_of(family).config.from_dict(raw)
        _require_plain(config)
        return Model.model_validate({"family": family, **_settings(config)})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg'].removeprefix('Value error, ')}"
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[-1].strip() or type(error).__name__
    raise CheckpointError(
        f"{CONFIG} of {source.source} describes a model that cannot be used ({reason}). Get it again, or use "
        "another checkpoint."
    )


def _require_plain(config: Any) -> None:
    """Raises `ValueError` for what our stages do not compute."""
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r}, where only silu is known")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not 1")
    if getattr(config, "layer_types", None) is not None:
        window, first = _sliding(config)
        kinds = [window and layer >= first for layer in range(config.num_hidden_layers)]
        if config.layer_types != ["sliding_attention" if k else "full_attention" for k in kinds]:
            raise ValueError(
                "layer_types mix full and sliding attention in another way than max_window_layers"
            )


def _sliding(config: Any) -> tuple[int, int]:
    """(tokens of the sliding window or 0, layers before it)."""
    window = getattr(config, "sliding_window", None) or 0
    first = getattr(config, "max_window_layers", 0)
    return (window, first) if window and first < config.num_hidden_layers else (0, 0)


def _settings(config: Any) -> dict[str, Any]:
    window, full_layers = _sliding(config)
    rope = {name: value for name, value in config.rope_parameters.items() if value is not None}
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    for name in ("type", "partial_rotary_factor"):
        rope.pop(name, None)
    head_dim = getattr(config, "head_dim", None) or 0
    is_usual = head_dim * config.num_attention_heads == config.hidden_size
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": 0 if is_usual else head_dim,
        "intermediate_size": config.intermediate_size,
        "tied_embeddings": bool(config.tie_word_embeddings),
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "sliding_window": window,
        "full_layers": full_layers,
        "max_positions": config.max_position_embeddings,
        "rope_theta": theta,
        "rope": {"type": kind, **rope},
        "norm_eps": config.rms_norm_eps,
        "init_std": config.initializer_range or Model.model_fields["init_std"].default,
    }


def unread_start(source: Pretrained, stages: Any) -> Start:
    """The [start] section with digests still to be computed, once the stages are known to fit the model."""
    count = stages if isinstance(stages, int) and 0 < stages <= 512 else 1
    return Start(name=re.sub(r"[^\w./-]", "-", source.name)[:128], digests=(UNKNOWN_DIGEST,) * count)


def with_digests(source: Pretrained, manifest: Manifest) -> Manifest:
    """Reads and checks all weights."""
    assert manifest.start is not None
    logger.info("Reading the weights of %s: their SHA-256 goes into the manifest.", source.name)
    digests = tuple(stage_digest(source, manifest, stage) for stage in range(manifest.stages))
    return manifest.model_copy(update={"start": manifest.start.model_copy(update={"digests": digests})})
