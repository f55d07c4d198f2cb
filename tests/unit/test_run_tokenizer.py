"""Founding a run with a tokenizer: what its manifest says, and every founder's mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.creating.choosing import with_tokenizer
from bootstrap.creating.run import found
from bootstrap.found_cli import app
from node.data.tokenizer import identity_of
from protocol.errors import TokenizerError
from protocol.manifest import load_preset
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizer_kinds import Kind
from tests.unit.tokenizers_made_here import bpe

FITTING = micro_manifest(model__vocab_size=300)


def test_the_manifest_names_the_tokenizer_by_its_hash_and_a_preset_is_made_to_fit() -> None:
    own = with_tokenizer(FITTING, bpe())
    assert (own.data.tokenizer, own.data.end_of_text) == (identity_of(bpe()), "<|endoftext|>")
    assert own.model.vocab_size == 300
    assert with_tokenizer(load_preset("tiny"), bpe(), is_preset=True).model.vocab_size == 320
    assert with_tokenizer(own, bpe()) == own


def test_the_founder_keeps_the_file_and_takes_it_up_again(tmp_path: Path) -> None:
    manifest = with_tokenizer(FITTING, bpe())
    assert found(tmp_path, manifest, bpe()).tokenizer == bpe()
    assert found(tmp_path, None).tokenizer == bpe()
    assert found(tmp_path, None).signed.manifest == manifest
    assert found(tmp_path / "bytes", FITTING).tokenizer is None


def test_founders_mistakes_say_what_to_do(tmp_path: Path) -> None:
    manifest = with_tokenizer(FITTING, bpe())
    other = bpe(special=("<|endoftext|>", "<|more|>"))
    with pytest.raises(TokenizerError, match=r"300 tokens, model.vocab_size is 256. Set"):
        with_tokenizer(micro_manifest(), bpe())
    with pytest.raises(TokenizerError, match=r"names another tokenizer.*data.tokenizer"):
        with_tokenizer(manifest, other)
    with pytest.raises(TokenizerError, match=r"no end-of-text token.*--end-of-text"):
        with_tokenizer(FITTING, bpe(special=()))
    with pytest.raises(TokenizerError, match=r"no token '</s>'"):
        with_tokenizer(FITTING, bpe(), "</s>")
    with pytest.raises(TokenizerError, match="not JSON"):
        with_tokenizer(FITTING, b"not JSON")
    with pytest.raises(TokenizerError, match=r"Give its tokenizer.json with --tokenizer FILE"):
        found(tmp_path, manifest)
    with pytest.raises(TokenizerError, match="not the tokenizer of run"):
        found(tmp_path, manifest, other)
    assert not (tmp_path / "manifest.noloco").exists()


@pytest.mark.parametrize("model", ["BPE", "Unigram", "WordPiece", "WordLevel"])
def test_a_tokenizer_that_cannot_write_all_text_founds_nothing(model: str, tmp_path: Path) -> None:
    file, directory = tmp_path / "tokenizer.json", tmp_path / "run"
    file.write_bytes(Kind(model, has_unknown=False).file())
    answer = CliRunner().invoke(app, ["--tokenizer", str(file), "--dir", str(directory)])
    assert answer.exit_code == 2
    assert "has no token for some text, as" in answer.output
    assert "Traceback" not in answer.output
    assert not directory.exists()


def test_what_a_tokenizer_loses_is_told_when_a_run_is_founded(caplog: pytest.LogCaptureFixture) -> None:
    raw = Kind("Unigram", has_unknown=True).file()
    with_tokenizer(micro_manifest(), raw)
    assert "becomes <unk>" in caplog.text
    caplog.clear()
    with_tokenizer(FITTING, bpe())
    assert not caplog.text
