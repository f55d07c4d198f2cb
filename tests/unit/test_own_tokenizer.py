"""`noloco tokenizer`: a vocabulary made of a founder's text is one that a run can be founded on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bootstrap.creating.choosing import RunOptions
from bootstrap.creating.probing import probe
from bootstrap.tools_cli import app
from node.data.tokenizer import FileTokenizer, end_of_text_in
from protocol.run.manifest import load_preset

SENTENCES = "Der Bär wohnt im Wald und isst Beeren; 中文 🙂.\nThe cat sat on the mat, and then it ran away.\n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(SENTENCES * 20, encoding="utf-8")
    return folder


def made(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tokenizer", *map(str, arguments)])


@pytest.mark.parametrize("pattern", ["", "*.txt"])
def test_it_writes_what_a_run_is_founded_with(pattern: str, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.json"
    answer = made(texts / pattern, "--vocab", 320, "--out", out)
    assert answer.exit_code == 0, answer.output
    assert "320 tokens" in answer.output
    raw = out.read_bytes()
    assert probe(raw, end_of_text_in(raw)) == "", "every text comes back"
    manifest, kept = RunOptions("llama-5m", tokenizer=str(out)).resolved()
    assert (manifest.model.vocab_size, kept) == (320, raw)
    ids = FileTokenizer(raw, end_of_text_in(raw)).encode_batch([SENTENCES])[0]
    assert len(ids) < len(SENTENCES.encode()) / 2


def test_the_same_text_gives_the_same_tokenizer(texts: Path, tmp_path: Path) -> None:
    for name in "ab":
        made(texts, "--vocab", 300, "--out", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_cannot_be_is_said_and_nothing_is_replaced(texts: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    refused = made(texts, "--out", kept)
    assert (refused.exit_code, kept.read_text()) == (2, "mine")
    assert "--force" in refused.output
    assert "Check the path" in made(tmp_path / "none", "--out", tmp_path / "x.json").output
    assert made(texts, "--vocab", 100, "--out", tmp_path / "x.json").exit_code == 2
    assert made(texts, "--vocab", 300, "--out", kept, "--force").exit_code == 0


@pytest.mark.parametrize("preset", ["llama-5m", "llama-20m", "llama-60m"])
def test_a_preset_has_the_size_that_it_is_named_after(preset: str) -> None:
    model = load_preset(preset).model
    total = model.layers * model.layer_parameters + 2 * model.table_parameters
    assert total == pytest.approx(float(preset[6:-1]) * 1e6, rel=0.03)
