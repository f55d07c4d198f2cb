"""A run that starts from a checkpoint keeps its chat template, in whichever form that has it, and its exports too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bootstrap.creating.choosing import RunOptions
from bootstrap.export.tokenizer import tokenizer_of_run
from protocol.errors import CheckpointError
from protocol.records.identity import Identity
from protocol.run.signed_manifest import SignedManifest
from protocol.run.start import MOST_TEMPLATE_BYTES
from tests.pretrained import saved_model
from tests.unit.tokenizers_made_here import bpe

TEMPLATE = "{% for message in messages %}{{ message.content }} ü\n{% endfor %}"


def config(template: object) -> dict[str, str]:
    return {"tokenizer_config.json": json.dumps({"chat_template": template})}


def model(directory: Path, files: dict[str, str]) -> Path:
    saved_model(directory, vocab_size=320)
    (directory / "tokenizer.json").write_bytes(bpe())
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def kept(directory: Path, tokenizer: str = "") -> str:
    """What is in the manifest as members get it."""
    manifest, _ = RunOptions(from_checkpoint=str(directory), tokenizer=tokenizer).resolved()
    signed = SignedManifest.sign(manifest, Identity.from_seed("owner"))
    start = SignedManifest.from_bytes(signed.to_bytes()).manifest.start
    assert start is not None
    return start.chat_template


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": TEMPLATE},
        {"chat_template.jinja": TEMPLATE, **config("an older one")},
        config(TEMPLATE),
        config([{"name": "tools", "template": "another"}, {"name": "default", "template": TEMPLATE}]),
    ],
    ids=["file", "file before setting", "setting", "several"],
)
def test_an_export_has_the_template_that_the_checkpoint_has(files: dict[str, str], tmp_path: Path) -> None:
    source, export = model(tmp_path / "model", files), tmp_path / "export"
    manifest, raw = RunOptions(from_checkpoint=str(source)).resolved()
    assert kept(source) == TEMPLATE
    export.mkdir()
    tokenizer_of_run(manifest, raw).save(export)
    loaded = AutoTokenizer.from_pretrained(export)
    assert loaded.chat_template == TEMPLATE
    chat = [{"role": "user", "content": "größer"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "größer ü\n"


@pytest.mark.parametrize(
    "files",
    [{}, config(None), config([]), config([{"name": "tools", "template": "another"}]), config([3, None])],
    ids=["no file", "none", "empty", "no default", "nonsense"],
)
def test_a_checkpoint_without_one_gives_exports_without_one(files: dict[str, str], tmp_path: Path) -> None:
    assert kept(model(tmp_path / "model", files)) == ""
    manifest, raw = RunOptions(from_checkpoint=str(tmp_path / "model")).resolved()
    (tmp_path / "export").mkdir()
    tokenizer_of_run(manifest, raw).save(tmp_path / "export")
    assert "chat_template" not in (tmp_path / "export" / "tokenizer_config.json").read_text()


def test_with_another_tokenizer_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(bpe(310))
    source = model(tmp_path / "model", {"chat_template.jinja": TEMPLATE})
    assert kept(source, tokenizer=str(tmp_path / "other.json")) == ""


def test_one_too_large_for_a_manifest_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    most = "ü" * (MOST_TEMPLATE_BYTES // 2)
    assert kept(model(tmp_path / "most", {"chat_template.jinja": most})) == most
    assert "chat template" not in caplog.text
    assert kept(model(tmp_path / "more", {"chat_template.jinja": most + "x"})) == ""
    assert "has more than 24576 bytes: exports will have none. Copy it" in caplog.text


def test_half_a_character_keeps_no_manifest_from_being_signed(tmp_path: Path) -> None:
    assert kept(model(tmp_path / "model", config("\ud83d"))) == "?"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model", {})
    (source / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=rf"{name} of .* cannot be read \(.*\). Get it again."):
        RunOptions(from_checkpoint=str(source)).resolved()
