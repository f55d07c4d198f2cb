"""One sentence for each thing that may be wrong with a checkpoint that a run is to start from."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bootstrap.creating.choosing import RunOptions
from node.model.pretrained import Pretrained
from protocol.errors import CheckpointError, ManifestError
from protocol.run.manifest import preset_text
from tests.pretrained import saved_model
from tests.unit.test_pretrained import replicas_of, run_of
from tests.unit.tokenizers_made_here import bpe


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        contents = json.loads(path.read_text())
        change(contents["weight_map"])
        path.write_text(json.dumps(contents))

    return apply


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return apply


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def only_pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


NAME = "model.layers.1.mlp.up_proj.weight"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another family": (change_config(model_type="gpt2"), "of the type 'gpt2'.*llama, mistral, qwen2, qwen3"),
    "no family": (change_config(model_type=None), "of the type None"),
    "quantized": (change_config(quantization_config={"bits": 4}), "is quantized"),
    "another activation": (change_config(hidden_act="gelu"), "hidden_act 'gelu'"),
    "unknown rope": (
        change_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
        "config.json of .* cannot be used",
    ),
    "nonsense in the config": (change_config(hidden_size="wide"), "config.json of .* cannot be used"),
    "too many layers": (change_config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
    "impossible heads": (change_config(num_key_value_heads=3), "model.heads 4 must be a multiple"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json.*save_pretrained"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "config.json of .* cannot be read"),
    "a list for a config": (lambda d: (d / "config.json").write_text("[]"), "it is not a JSON object"),
    "truncated": (truncate, "model.safetensors of .* is damaged or cut short.*Get it again"),
    "no tensors at all": (lambda d: (d / "model.safetensors").write_bytes(b""), "damaged or cut short"),
    "pickled weights": (only_pickled, "pickled weights only.*save_pretrained writes safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "a missing tensor": (change_weights(lambda w: w.__delitem__(NAME)), f"no tensor {NAME}"),
    "a wrong shape": (
        change_weights(lambda w: w.update({NAME: torch.zeros(3, 3)})),
        rf"{NAME} .* has the shape \(3, 3\), and config.json makes it \(32, 16\)",
    ),
    "integers": (
        change_weights(lambda w: w.update({NAME: torch.zeros(32, 16, dtype=torch.int8)})),
        "type I8: quantized weights cannot be trained",
    ),
    "beyond all weights": (
        change_weights(lambda w: w.update({NAME: torch.full((32, 16), -1e38)})),
        r"holds numbers beyond 1e\+09, as no model's weights are\. Get it again",
    ),
    "not a number": (
        change_weights(lambda w: w.update({NAME: torch.full((32, 16), float("nan"))})),
        "holds NaN or infinity",
    ),
}


def one_line(directory: Path) -> str:
    """What a founder is told about the checkpoint."""
    with pytest.raises(CheckpointError) as refusal:
        run_of(directory)
    text = str(refusal.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_checkpoint_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    damage, words = WRONG[case]
    saved_model(tmp_path / "model")
    damage(tmp_path / "model")
    text = one_line(tmp_path / "model")
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_index(lambda places: places.__delitem__(NAME)), f"names no file for {NAME}"),
        (change_index(lambda places: places.update({NAME: "../x.safetensors"})), "is not a file beside it"),
        (
            change_index(lambda places: places.update({NAME: "gone.safetensors"})),
            "gone.safetensors is missing",
        ),
        (lambda d: next(d.glob("model-00002*")).unlink(), "model-00002-of-.* is missing"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"a": 1}'), "no weight_map"),
    ],
)
def test_a_wrong_index_is_refused_in_one_line(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    saved_model(tmp_path / "model", max_shard_size="8KB")
    damage(tmp_path / "model")
    text = one_line(tmp_path / "model")
    assert re.search(words, text), text


class Trap:
    """Leaves a file behind where its pickle is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"])
def test_nothing_pickled_is_opened(name: str, tmp_path: Path) -> None:
    model, sprung = tmp_path / "model", tmp_path / "sprung"
    saved_model(model)
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Trap(sprung)))
    assert "pickled weights only" in one_line(model)
    assert not sprung.exists()
    pickle.loads((model / name).read_bytes())  # our own, which shows that the trap works
    assert sprung.exists()


def test_what_is_neither_a_directory_nor_a_name_of_the_hub_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.safetensors").write_bytes(b"")
    for source in (tmp_path / "nowhere" / "model", tmp_path / "file.safetensors"):
        with pytest.raises(CheckpointError, match=r"is not a directory\. Give the one"):
            Pretrained(str(source))


def test_a_model_of_the_hub_that_was_fetched_before_needs_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--somebody--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("a" * 40)
    snapshot = kept / "snapshots" / ("a" * 40)
    saved_model(snapshot, max_shard_size="8KB", vocab_size=320)
    (snapshot / "tokenizer.json").write_bytes(bpe())
    manifest, tokenizer = RunOptions("tiny", from_checkpoint="somebody/model").resolved()
    assert tokenizer is not None
    assert manifest.start is not None
    assert manifest.start.name == "somebody/model"
    next(kept.rglob("model-00002*")).unlink()
    for name in ("somebody/model", "somebody/else"):
        with pytest.raises(CheckpointError, match="The hub cannot be reached, and not all of"):
            RunOptions("tiny", from_checkpoint=name).resolved()


def test_more_stages_than_layers_are_refused_as_in_any_manifest(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    with pytest.raises(ManifestError, match=r"stages 4 exceeds model\.layers 3"):
        run_of(tmp_path / "model", stages=4)


def test_the_weights_are_those_of_as_many_stages_as_are_asked_for(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    options = RunOptions("tiny", from_checkpoint=str(tmp_path / "model"), stages=3, steps=40)
    manifest, _ = options.resolved()
    assert (manifest.stages, manifest.inner.total_steps) == (3, 40)
    with pytest.raises(ManifestError, match=r"stages 4 exceeds model\.layers 3"):
        replace(options, stages=4).resolved()
    replicas_of(tmp_path / "model", manifest)  # checks the weights of each stage


def test_a_manifest_with_a_model_of_its_own_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(preset_text("tiny"), encoding="utf-8")
    with pytest.raises(ManifestError, match=r"has a \[model\] section"):
        RunOptions(file=file, from_checkpoint=str(tmp_path / "model")).resolved()
