"""An export with a tokenizer of its own, made by hand: what commands and both transformers make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner, Result

from bootstrap.creating.choosing import RunOptions, with_tokenizer
from bootstrap.export.checkpoint import Facts, save_json
from bootstrap.export.model_config import config_of
from bootstrap.export.tokenizer import fingerprint_of, tokenizer_of_run
from bootstrap.tools_cli import app
from node.data.tokenizer import FileTokenizer, identity_of
from protocol.run.manifest import Manifest
from tests.pretrained import saved_model
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizer_kinds import END, Kind
from tests.unit.tokenizers_made_here import bpe

RAW = Kind("Unigram that falls back", has_unknown=True, adds=True).file()
ROWS = "".join(json.dumps({"text": f"the cat sat {place} times"}) + "\n" for place in range(400))


def export_with(raw: bytes, directory: Path) -> Manifest:
    """The files of an export with random weights."""
    manifest = with_tokenizer(
        micro_manifest(model__vocab_size=320, data__held_out=0.4, data__source="local"), raw
    )
    saved_model(directory, vocab_size=320)
    tokenizer_of_run(manifest, raw).save(directory)
    facts = Facts("run", manifest, (), 1, "fp32", tokenizer_fingerprint=fingerprint_of(manifest, raw))
    (directory / "noloco.json").write_text(facts.as_json(), encoding="utf-8")
    return manifest


def evaluated(directory: Path) -> Result:
    rows = directory.parent / "rows.jsonl"
    rows.write_text(ROWS, encoding="utf-8")
    held_out = ["--data", str(rows), "--held-out", "--data-cache", str(directory.parent / "cache")]
    return CliRunner().invoke(app, ["eval", "--model", str(directory), *held_out])


@pytest.mark.parametrize("raw", [RAW, bpe()], ids=["pieces", "bytes"])
def test_what_was_held_out_is_measured_by_the_files_of_an_export(raw: bytes, tmp_path: Path) -> None:
    manifest = export_with(raw, tmp_path / "export")
    written = (tmp_path / "export" / "tokenizer.json").read_bytes()
    assert (
        identity_of(written) != manifest.data.tokenizer
    )  # the library writes another file that does the same
    result = evaluated(tmp_path / "export")
    assert result.exit_code == 0, result.output
    assert "nats per token" in result.output


@pytest.mark.parametrize("other", ["another vocabulary", "other merges"])
def test_an_exports_file_that_tokenises_otherwise_is_refused(other: str, tmp_path: Path) -> None:
    export_with(bpe(), tmp_path / "export")
    file = tmp_path / "export" / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["model"]["merges"] = settings["model"]["merges"][:-2]
    file.write_bytes(bpe(310) if other == "another vocabulary" else json.dumps(settings).encode())
    result = evaluated(tmp_path / "export")
    assert result.exit_code == 2
    assert "is not the tokenizer of run 'micro', which the export had. Export again" in result.output


def test_an_export_of_before_that_names_no_fingerprint_is_measured(tmp_path: Path) -> None:
    export_with(RAW, tmp_path / "export")
    facts = tmp_path / "export" / "noloco.json"
    known = json.loads(facts.read_text(encoding="utf-8"))
    del known["tokenizer_fingerprint"]
    facts.write_text(json.dumps(known), encoding="utf-8")
    assert evaluated(tmp_path / "export").exit_code == 0


@torch.no_grad()
def says_always(model: PreTrainedModel, token: int) -> None:
    """Whatever it is asked."""
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            parameter.zero_()
            parameter[token] = 1.0
        elif name == "model.norm.weight" or name == "model.embed_tokens.weight":
            parameter.fill_(1.0)


def test_a_text_ends_before_its_end_is_written(tmp_path: Path) -> None:
    export_with(RAW, tmp_path / "export")
    tokenizer, model = (
        kind.from_pretrained(tmp_path / "export") for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    says_always(model, tokenizer.eos_token_id)
    ids = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    model.generation_config.update(**ids)
    model.save_pretrained(tmp_path / "export")
    command = ["generate", "the", "--model", str(tmp_path / "export"), "--tokens", "9"]
    assert CliRunner().invoke(app, command).stdout == "\n"


def test_a_generated_text_goes_on_from_its_prompt_with_its_first_space(tmp_path: Path) -> None:
    export_with(RAW, tmp_path / "export")
    tokenizer, model = (
        kind.from_pretrained(tmp_path / "export") for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    says_always(model, tokenizer.convert_tokens_to_ids("▁"))
    model.save_pretrained(tmp_path / "export")
    result = CliRunner().invoke(
        app, ["generate", "the", "--model", str(tmp_path / "export"), "--tokens", "1"]
    )
    assert result.exit_code == 0, result.output
    inputs = tokenizer("the", return_tensors="pt")
    whole = tokenizer.decode(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0])
    assert whole == "the "
    assert "the" + result.stdout.removesuffix("\n") == whole


def test_nothing_is_put_around_a_text_by_its_export(tmp_path: Path) -> None:
    export_with(RAW, tmp_path / "export")
    loaded, trained = AutoTokenizer.from_pretrained(tmp_path / "export"), FileTokenizer(RAW, END)
    for text in ("the cat", "größer", ""):
        ids = trained.encode_batch([text])[0].tolist()
        assert loaded(text).input_ids == loaded(text, add_special_tokens=False).input_ids == ids
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (END, END, END)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_positions_have_the_names_of_transformers_4_and_5(rope: dict[str, object], tmp_path: Path) -> None:
    saved_model(tmp_path / "model", max_position_embeddings=512, rope_parameters=rope)
    manifest, _ = RunOptions(from_checkpoint=str(tmp_path / "model")).resolved()
    save_json(config_of(manifest), tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["rope_theta"] == rope["rope_theta"]
    stretched = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert written["rope_scaling"] == (None if rope["rope_type"] == "default" else stretched)
    assert written["torch_dtype"] == written["dtype"] == "float32"
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.rope_parameters == rope
    again, _ = RunOptions(from_checkpoint=str(tmp_path / "model")).resolved()
    assert again.model == manifest.model


def test_the_tokenizer_has_a_class_that_transformers_4_and_5_know(tmp_path: Path) -> None:
    export_with(RAW, tmp_path / "export")
    written = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_input_names"] == ["input_ids", "attention_mask"]  # 4 would give token_type_ids, too
