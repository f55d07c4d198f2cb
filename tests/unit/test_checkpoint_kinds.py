"""A folder that was meant for a checkpoint and is none says what it is, and what helps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.found_cli import app
from node.data.tokenizer_files import read_tokenizer
from node.model.checkpoint_kinds import KINDS, kind_of
from node.model.pretrained import Pretrained
from protocol.errors import CheckpointError, TokenizerError
from tests.pretrained import saved_model
from tests.unit.tokenizers_made_here import bpe

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
# files in place of model.safetensors, and what is said of them
INSTEAD = {
    "adapter_model.safetensors": "an adapter.*merge_and_unload",
    "adapter_model.bin": "an adapter.*merge_and_unload",
    "diffusion_pytorch_model.safetensors": "a pipeline of diffusers",
    "model-q4_k_m.gguf": "a GGUF file",
    "ggml-model-q4_0.bin": "a GGUF file",
    "model.onnx": "an ONNX model",
    "openvino_model.bin": "compiled for one program",
    "rank0.engine": "compiled for one program",
    "weights.npz": "weights of MLX",
    "weights.00.safetensors": "weights of MLX",
    "consolidated.safetensors": "Mistral's own format",
    "consolidated.00.pth": "Meta's own format.*could run any code",
    "zero_to_fp32.py": "training on several devices.*zero_to_fp32",
    "__0_0.distcp": "training on several devices",
    "tf_model.h5": "weights of TensorFlow.*from_tf=True",
    "model.ckpt-500.index": "weights of TensorFlow",
    "flax_model.msgpack": "weights of Flax.*from_flax=True",
    "rust_model.ot": "a model of another program",
    "llama.nemo": "a model of another program",
    "model-00001-of-00002.safetensors": r"parts of a model without model\.safetensors\.index\.json",
    "pytorch_model.bin": "pickled weights only, which could run any code.*save_pretrained",
    "pytorch_model-00001-of-00002.bin": "pickled weights only, which could run any code",
    "model.pt": "pickled weights only",
    "last.ckpt": "pickled weights only",
    "model.safetensors.incomplete": "a download that was cut short",
    "model.safetensors.part": "a download that was cut short",
    "model.safetensors.aria2": "a download that was cut short",
    "model.fp16.safetensors": r"under a name that is not looked for.*rename it to model\.safetensors",
    "model.tar.gz": "a packed archive.*Unpack it",
    "model.zip": "a packed archive",
    "models--meta-llama--Llama-3.2-1B": "the cache of the Hugging Face hub.*organisation/model",
    "checkpoint-500": "several checkpoints of a training.*Name one",
    "optimizer.pt": "neither model.safetensors nor",
    "training_args.bin": "neither model.safetensors nor",
}


def refusal(model: Path) -> str:
    """What noloco-bootstrap says; nothing is left of the run."""
    directory = model.parent / "run"
    answer = CliRunner().invoke(app, ["--from-checkpoint", str(model), "--state-dir", str(directory)])
    assert answer.exit_code == 2, answer.output
    assert "Traceback" not in answer.output
    assert not directory.exists()
    return " ".join(answer.output.split())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A config.json."""
    directory = tmp_path_factory.mktemp("model")
    saved_model(directory)
    return (directory / "config.json").read_bytes()


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_there_in_place_of_the_weights_is_named(
    name: str, with_config: bool, config: bytes, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / name).write_bytes(b"")
    (model / "README.md").write_bytes(b"")
    if with_config:
        (model / "config.json").write_bytes(config)
    words = INSTEAD[name]
    if not with_config and words.startswith("neither"):
        words = "has no config.json"
    assert re.search(words, refusal(model)), refusal(model)


def test_each_kind_has_its_example() -> None:
    found = [kind_of([name]) for name in INSTEAD]
    assert {each[0] for each in found if each is not None} == set(KINDS)


def test_the_page_has_each_kind() -> None:
    rows = dict(re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \|$", PAGE[PAGE.index("## What is no checkpoint") :]))
    listed = {kind.what: kind.help for kind in KINDS}
    assert {what: rows.get(what) for what in listed} == listed


@pytest.mark.parametrize(
    ("folders", "named"),
    [
        (["final"], "has its checkpoint in a folder of it. Name that: {model}/final."),
        (["checkpoint-500"], "has its checkpoint in a folder of it. Name that: {model}/checkpoint-500."),
        (["checkpoint-900", "checkpoint-1500"], "has 2 checkpoints in folders of it. {last}checkpoint-1500."),
        (["checkpoint-1500", "final"], "has 2 checkpoints in folders of it. {last}final."),
        (["models--a--b/snapshots/0123"], "Name that: {model}/models--a--b/snapshots/0123."),
        (["out/run/model"], "Name that: {model}/out/run/model."),
        (["it's final"], "Name that: '{model}/it'\"'\"'s final'."),
        (["a/b/c/d/e"], "has no config.json"),
        ([".cache/model"], "has no config.json"),
    ],
)
@pytest.mark.parametrize("beside", ["README.md", "optimizer.pt", "config.json"])
def test_a_checkpoint_in_a_folder_of_the_one_that_was_named_is_named(
    beside: str, folders: list[str], named: str, config: bytes, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    for folder in folders:
        saved_model(model / folder)
    (model / beside).write_bytes(config)
    if beside == "config.json" and named.startswith("has no"):
        named = "has neither model.safetensors"
    assert named.format(model=model, last=f"Name one, as the last: {model}/") in refusal(model)


def test_an_adapter_beside_its_base_is_what_was_meant(tmp_path: Path) -> None:
    saved_model(tmp_path / "model" / "base")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert "has an adapter (LoRA), not a model" in refusal(tmp_path / "model")


def test_a_whole_checkpoint_is_one_whatever_lies_beside_it() -> None:
    beside = ["model.safetensors", "config.json", "training_args.bin", "optimizer.pt"]
    assert kind_of(beside) is None
    assert kind_of(["model-00001-of-00002.safetensors", "model.safetensors.index.json"]) is None


def test_an_empty_folder_is_empty(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert "model is empty. Give the folder that config.json" in refusal(tmp_path / "model")


@pytest.mark.parametrize("hub", ["", ".cache/huggingface/download/"])
def test_a_part_that_is_still_on_its_way_is_named(hub: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    saved_model(model, max_shard_size="8KB")
    part = next(model.glob("model-00002*"))
    (model / hub).mkdir(parents=True, exist_ok=True)
    part.rename(model / hub / f"{part.name}.incomplete")
    assert f"{part.name} is missing in" in refusal(model)
    assert "where a download was cut short" in refusal(model)


@pytest.mark.parametrize(
    "pointer",
    [b"version https://git-lfs.github.com/spec/", b"# xet version ", b"/annex/objects/"],
    ids=["lfs", "xet", "annex"],
)
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
def test_a_file_that_is_yet_to_be_fetched_is_named(name: str, pointer: bytes, tmp_path: Path) -> None:
    model = tmp_path / "model"
    saved_model(model, vocab_size=320)
    (model / "tokenizer.json").write_bytes(bpe())
    (model / name).write_bytes(pointer + b"v1\noid sha256:0\nsize 12345\n")
    told = refusal(model)
    assert re.search(
        rf"{re.escape(name)}.* is a (Git LFS|Xet|git-annex) pointer.*: git -C \S+/model ", told
    ), told


def test_an_index_that_is_yet_to_be_fetched_is_named(tmp_path: Path) -> None:
    saved_model(tmp_path / "model", max_shard_size="8KB")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(LFS)
    assert "is a Git LFS pointer" in refusal(tmp_path / "model")


def test_an_adapter_beside_a_model_is_not_passed_over(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert "has an adapter (adapter_config.json), which changes what the model" in refusal(tmp_path / "model")


def test_a_tokenizer_that_is_yet_to_be_fetched_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(LFS)
    with pytest.raises(
        TokenizerError, match=r"is yet to be fetched: it is a Git LFS pointer.*git -C \S+ lfs pull\.$"
    ):
        read_tokenizer(str(tmp_path))


def test_of_the_hub_it_is_told_by_the_names_that_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.model.pretrained.Pretrained._file", lambda self, name: None)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.list_repo_files", lambda self, name: [".gitattributes", "x-q8.gguf"]
    )
    with pytest.raises(CheckpointError, match=r"somebody/model has a GGUF file \(x-q8.gguf\)"):
        Pretrained("somebody/model").config()
