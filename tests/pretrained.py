"""Small random models that transformers has saved, to start runs from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bootstrap.export.model_config import config_of
from protocol.run.manifest import Manifest
from protocol.run.model import Family

SHAPES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that every detail of the model shows in its loss
}


def transformers_config(manifest: Manifest) -> PreTrainedConfig:
    """What transformers makes of an export's config.json."""
    return AutoConfig.for_model(**config_of(manifest))


def saved_model(
    directory: Path, family: Family = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Save it there and return it; `max_shard_size` among the changes cuts it into several files."""
    shards = {"max_shard_size": changes.pop("max_shard_size")} if "max_shard_size" in changes else {}
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **SHAPES | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:  # gains of one and biases of zero would hide one that was left out
                parameter.add_(torch.randn(parameter.shape) / 5)
    model.save_pretrained(directory, **shards)
    return model
