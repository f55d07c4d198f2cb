"""What a person gets wrong about exports, prompts and texts: one line each that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.generation.exported import load_exported
from bootstrap.tools_cli import app
from tests.swarm.micro import micro_manifest

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWB1nCVQyW3BE4zaVYJexq3mR44ZNQQNjX5Q1yseqVU9z4"
CONTEXT = 32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that a byte tokenizer goes with, as any library would save it."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer_of_run(micro_manifest(), None).save(directory)
    return directory


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def noloco(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def assert_refused(*arguments: str, says: str) -> None:
    """One sentence or two on what is wrong and what to do, and no traceback."""
    result = noloco(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    errors = [line for line in result.output.strip().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.output
    assert says in errors[0]
    assert errors[0].endswith((".", ")"))


def test_a_good_model_generates_and_is_measured(saved: Path, tmp_path: Path) -> None:
    said = noloco("generate", "abc", "--model", str(saved), "--tokens", "5")
    assert said.exit_code == 0, said.output
    assert noloco("generate", "--model", str(saved), "--tokens", "5", stdin="abc").output == said.output
    assert "context of 32 tokens is full" in noloco("generate", "abc", "--model", str(saved)).output
    text = tmp_path / "text.txt"
    text.write_text("what will be measured\n" * 9)
    measured = noloco("eval", "--model", str(saved), "--data", str(text))
    assert measured.exit_code == 0, measured.output
    assert f"on {22 * 9 - 1} tokens ({22 * 9 - 1} bytes), by {saved}" in measured.output


def test_the_text_alone_is_on_standard_output(saved: Path) -> None:
    answer = noloco("generate", "abc", "--model", str(saved))
    assert "context of 32 tokens is full" in answer.stderr
    assert "context" not in answer.stdout
    cut_short = noloco("generate", "abc", "--model", str(saved), "--tokens", "5")
    assert answer.stdout.startswith(cut_short.stdout.removesuffix("\n"))
    assert cut_short.stderr == "Getting the model ready …\n"


def test_it_computes_on_a_gpu_where_there_is_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = list[object]()

    def to(model: LlamaForCausalLM, place: object) -> LlamaForCausalLM:
        places.append(place)
        return model

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(LlamaForCausalLM, "to", to)
    load_exported(saved)
    assert places == ["cuda"]


def test_directories_that_hold_no_model(model: Path, tmp_path: Path) -> None:
    assert_refused("generate", "a", "--model", str(tmp_path / "none"), says="There is no directory")
    assert_refused("eval", "--model", str(tmp_path / "none"), says="There is no directory")
    (tmp_path / "empty").mkdir()
    assert_refused("generate", "a", "--model", str(tmp_path / "empty"), says="is empty. Give the folder")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_refused("generate", "a", "--model", str(model), says="cannot be loaded")
    weights.unlink()
    assert_refused("generate", "a", "--model", str(model), says="neither model.safetensors nor")
    weights.write_bytes(whole)
    (model / "config.json").write_text("{")
    assert_refused("generate", "a", "--model", str(model), says="config.json of")


@pytest.mark.parametrize("command", [("generate", "a"), ("eval",)], ids=lambda words: words[0])
def test_what_is_there_in_place_of_a_model_is_named_as_at_a_founding(
    command: tuple[str, ...], model: Path
) -> None:
    named = (*command, "--model", str(model))
    weights = model / "model.safetensors"
    (model / "adapter_config.json").write_text("{}")
    assert_refused(*named, says="has an adapter (adapter_config.json)")
    (model / "adapter_config.json").unlink()
    whole = weights.read_bytes()
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_refused(*named, says="is a Git LFS pointer. Get the file that it stands for: git -C ")
    weights.rename(model / "pytorch_model.bin")
    assert_refused(*named, says="pickled weights only, which could run any code")
    (model / "pytorch_model.bin").rename(model / "model-q4.gguf")
    assert_refused(*named, says="has a GGUF file (model-q4.gguf)")
    (model / "model-q4.gguf").unlink()
    (model / "config.json").rename(model / "config.txt")
    (model / "final").mkdir()
    (model / "config.txt").rename(model / "final" / "config.json")
    (model / "final" / weights.name).write_bytes(whole)
    assert_refused(*named, says=f"has its checkpoint in a folder of it. Name that: {model}/final.")
    (model / "final").rename(model / "partial")
    assert_refused(*named, says="one that was cut short goes on with the same `noloco export")


def test_tokenizers_that_are_missing_or_unknown(model: Path) -> None:
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text('{"version": "1.0", "model": {"type": "Telepathy"}}')
    assert_refused("generate", "a", "--model", str(model), says="unknown or damaged")
    tokenizer.unlink()
    (model / "tokenizer_config.json").unlink()
    assert_refused("generate", "a", "--model", str(model), says="no tokenizer.json")


def test_prompts_and_settings_that_cannot_be(saved: Path) -> None:
    there = ("--model", str(saved))
    assert_refused("generate", "a" * CONTEXT, *there, says="The prompt has 32 tokens")
    assert_refused("generate", "a", *there, "--temperature", "-1", says="--temperature")
    assert_refused("generate", "a", *there, "--top-k", "5", says="--temperature above 0")
    assert_refused("generate", "a", *there, "--tokens", "0", says="--tokens")
    assert_refused("generate", "a", says="Name the model")
    assert_refused("generate", "a", *there, "--join", NOBODY, says="Name the model")
    assert_refused("eval", says="Name the model")


def test_texts_that_cannot_be_measured(saved: Path, tmp_path: Path) -> None:
    there = ("eval", "--model", str(saved))
    assert_refused(*there, says="Which text this model's run holds out is unknown")
    assert_refused(*there, "--data", str(tmp_path / "missing.txt"), says="missing.txt")
    (tmp_path / "short.txt").write_text("x")
    assert_refused(*there, "--data", str(tmp_path / "short.txt"), says="nothing to predict")
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)))
    assert_refused(*there, "--data", str(tmp_path / "binary.txt"), says="not UTF-8")
    (saved / "noloco.json").write_text(json.dumps({"manifest": {"name": "none"}}))
    assert_refused(*there, says="Which text this model's run holds out is unknown")
    (saved / "noloco.json").unlink()


def test_exports_that_cannot_be_written(saved: Path, tmp_path: Path) -> None:
    there = ("export", "--join", NOBODY, "--out")
    (tmp_path / "file").write_text("")
    assert_refused(*there, str(tmp_path / "file"), says="it is a file")
    assert_refused(*there, str(tmp_path / "file" / "below"), says="Choose another --out")
    assert_refused(*there, "/proc/model", says="Cannot write to /proc/model")
    assert_refused(*there, str(saved), says="holds a model, not an export of a run")
    assert_refused(*there, str(tmp_path / "new"), "--shard-size", "large", says="--shard-size 2GB")
    assert_refused(*there, str(tmp_path / "new"), "--dtype", "int4", says="--dtype")
