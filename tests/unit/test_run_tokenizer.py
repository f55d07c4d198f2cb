"""Founding a run with a tokenizer: what its manifest says, and every founder's mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from bootstrap.creating.choosing import RunOptions, with_tokenizer
from bootstrap.creating.run import found
from bootstrap.found_cli import app
from node.data.tokenizer import identity_of
from node.membership.data_source import RunTokenizer
from protocol.errors import TokenizerError
from protocol.messages.state import TokenizerPiece
from protocol.records.identity import Identity
from protocol.run.manifest import BYTES, load_preset
from protocol.run.piece_hashes import PieceHashes
from protocol.run.signed_manifest import SignedManifest
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


def test_bytes_are_tokens_unless_the_founder_says_otherwise(tmp_path: Path) -> None:
    assert RunOptions().resolved()[0].data.tokenizer == BYTES
    (tmp_path / "tokenizer.json").write_bytes(bpe())
    named = RunOptions(tokenizer=str(tmp_path)).resolved()[0]
    assert (named.data.tokenizer, named.data.end_of_text) == (identity_of(bpe()), "<|endoftext|>")


def test_the_end_of_text_may_be_named() -> None:
    raw = bpe(special=("<|endoftext|>", "<|done|>"))
    assert with_tokenizer(FITTING, raw, "<|done|>").data.end_of_text == "<|done|>"


def test_the_founder_keeps_the_file_and_takes_it_up_again(tmp_path: Path) -> None:
    manifest = with_tokenizer(FITTING, bpe())
    assert found(tmp_path, manifest, bpe()).tokenizer == bpe()
    assert found(tmp_path, None).tokenizer == bpe()
    assert found(tmp_path, None).signed.manifest == manifest
    assert found(tmp_path / "bytes", FITTING).tokenizer is None


def test_the_founder_signs_the_pieces_beside_the_manifest_which_stays_as_it_was(tmp_path: Path) -> None:
    manifest = with_tokenizer(FITTING, bpe())
    founded = found(tmp_path, manifest, bpe())
    assert founded.signed.manifest.model_dump() == manifest.model_dump(), "earlier versions read it"
    hashes = PieceHashes.read(founded.hashes, manifest.data.tokenizer, founded.signed.public_key)
    assert hashes.require(0, bpe()) == bpe()
    (tmp_path / "run.key").rename(tmp_path / "elsewhere")
    assert found(tmp_path, None).hashes == founded.hashes, "kept beside the manifest"
    (tmp_path / "tokenizer.hashes").unlink()
    assert found(tmp_path, None).hashes == b"", "as in a run founded before, whose key is elsewhere"
    (tmp_path / "elsewhere").rename(tmp_path / "run.key")
    assert found(tmp_path, None).hashes == founded.hashes, "as in a run founded before, whose key is here"
    assert found(tmp_path / "bytes", FITTING).hashes == b""


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
    answer = CliRunner().invoke(app, ["--tokenizer", str(file), "--state-dir", str(directory)])
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


async def test_a_node_takes_the_file_that_is_named_and_asks_nobody(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(bpe())
    manifest = SignedManifest.sign(with_tokenizer(FITTING, bpe()), Identity.from_seed("owner"))
    nobody = cast("Any", None)
    tokenizer = RunTokenizer(manifest, nobody, nobody, own=str(tmp_path / "mine.json"))
    await tokenizer.get()
    assert tokenizer.raw == bpe()
    (tmp_path / "mine.json").write_bytes(bpe(special=("<|endoftext|>", "<|more|>")))
    with pytest.raises(TokenizerError, match="not the tokenizer of run"):
        await RunTokenizer(manifest, nobody, nobody, own=str(tmp_path / "mine.json")).get()


def test_a_piece_has_128_kib_and_a_tokenizer_64_mib_at_most() -> None:
    TokenizerPiece(total=64 * 2**20, contents=bytes(128 * 1024))
    for total, size in ((64 * 2**20 + 1, 1), (64 * 2**20, 128 * 1024 + 1)):
        with pytest.raises(ValidationError):
            TokenizerPiece(total=total, contents=bytes(size))
