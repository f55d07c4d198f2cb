"""Stages' flat weights as a checkpoint in transformers' own layout: safetensors in shards, and their index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from numpy.typing import NDArray
from safetensors.torch import save_file

from node.model.flat import Slice, layout
from node.model.stage import model_config, parameter_shapes
from protocol.manifest import Manifest

PATTERN = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
_READ_AT_ONCE = 2**20


@dataclass(frozen=True)
class Weight:
    """One named parameter: at which place of which stage's flat weights it is."""

    stage: int
    place: Slice


def weights_of(manifest: Manifest) -> dict[str, Weight]:
    """Every parameter of the whole model under its name in a checkpoint, in the order of the stages.

    Where the output layer is the embedding, it is there once, as transformers saves it.
    """
    weights: dict[str, Weight] = {}
    for stage in range(manifest.stages):
        for place in layout(parameter_shapes(manifest, stage)):
            weights.setdefault(place.name, Weight(stage, place))
    if model_config(manifest).tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def write_shards(
    manifest: Manifest, stages: list[NDArray[np.float32]], directory: Path, dtype: torch.dtype, most: int
) -> Iterator[str]:
    """Write files of at most `most` bytes, or of one larger tensor, and yield the name of each when it is there.

    `stages` are the flat weights of each, mapped from files: memory for one shard is taken. Raises `OSError`.
    """
    weights = weights_of(manifest)
    shapes = {
        name: torch.empty(weight.place.shape, dtype=dtype, device="meta") for name, weight in weights.items()
    }
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=PATTERN, max_shard_size=most)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _tensor(weights[name], stages, dtype) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        yield file
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        yield INDEX


def _tensor(weight: Weight, stages: list[NDArray[np.float32]], dtype: torch.dtype) -> torch.Tensor:
    flat = stages[weight.stage][weight.place.start : weight.place.stop]
    return torch.from_numpy(np.array(flat)).view(weight.place.shape).to(dtype)


def sha256_of(path: Path) -> str:
    """Of a file, in hexadecimal."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_AT_ONCE):
            sha.update(chunk)
    return sha.hexdigest()


def checkpoint_config(manifest: Manifest, dtype: torch.dtype, ids: dict[str, int | None]) -> Any:
    """What config.json holds: the run's model, and the tokenizer's `ids` of special tokens."""
    config = model_config(manifest)
    config.dtype = dtype
    for name, token in ids.items():
        setattr(config, name, token)
    return config
