"""Checkpoints as people brought them in a hunt: what was wrong in silence, a traceback, or refused for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bootstrap.creating.choosing import RunOptions
from bootstrap.export.model_config import model_in
from bootstrap.generation.exported import load_exported
from node.model.pretrained import Pretrained
from protocol.errors import CheckpointError, StateError
from tests.pretrained import saved_model


def made(directory: Path) -> Path:
    saved_model(directory)
    return directory


def changed(model: Path, **settings: object) -> Path:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return model


def with_tokenizer(model: Path) -> Path:
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(model / "tokenizer.json"))
    return model


def test_settings_that_nest_without_end_are_told(tmp_path: Path) -> None:
    model = with_tokenizer(made(tmp_path))
    (model / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="nests too deeply"):
        Pretrained(str(model)).config()
    with pytest.raises(CheckpointError, match="nests too deeply"):
        load_exported(model)


def test_weights_that_are_not_there_are_not_drawn_at_random(tmp_path: Path) -> None:
    model = with_tokenizer(made(tmp_path))
    load_exported(model)
    file = model / "model.safetensors"
    weights = load_file(file)
    lost = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file({n: w for n, w in weights.items() if n != lost}, file, metadata={"format": "pt"})
    with pytest.raises(StateError, match="its files have no"):
        load_exported(model)
    save_file(weights | {lost: torch.full_like(weights[lost], torch.nan)}, file, metadata={"format": "pt"})
    with pytest.raises(StateError, match="holds NaN or infinity"):
        load_exported(model)


def test_two_names_of_one_function_are_one(tmp_path: Path) -> None:
    settings = json.loads((made(tmp_path) / "config.json").read_text())
    assert model_in(settings | {"hidden_act": "swish"}) == model_in(settings)


def test_a_model_of_one_layer_has_one_stage(tmp_path: Path) -> None:
    model = made(tmp_path)
    file = model / "model.safetensors"
    kept = {
        n: w for n, w in load_file(file).items() if not n.startswith(("model.layers.1", "model.layers.2"))
    }
    save_file(kept, file, metadata={"format": "pt"})
    changed(with_tokenizer(model), num_hidden_layers=1)
    options = RunOptions(None, None, "bytes", "", str(model))
    assert options._manifest().stages == 1
