"""From which tokenizer a run from a checkpoint gets its ids: the checkpoint's own, one that is named, or none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from typer.testing import CliRunner

from bootstrap.creating.choosing import RunOptions
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.found_cli import app
from node.data.tokenizer import FileTokenizer, identity_of
from protocol.errors import TokenizerError
from protocol.run.manifest import BYTES
from tests.pretrained import saved_model
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizers_made_here import TEXT, bpe

END = "<|endoftext|>"


def checkpoint(directory: Path, vocab_size: int, files: dict[str, str] | None = None) -> Path:
    """Files by name, with one underscore for the dot."""
    saved_model(directory, vocab_size=vocab_size)
    for name, contents in (files or {}).items():
        head, _, ending = name.rpartition("_")
        (directory / f"{head}.{ending}").write_text(contents, encoding="utf-8")
    return directory


def vocab_and_merges(raw: bytes) -> dict[str, str]:
    model = json.loads(raw)["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return {"vocab_json": json.dumps(model["vocab"]), "merges_txt": f"#version: 0.2\n{merges}\n"}


def refusal(model: Path, *options: str) -> str:
    """What noloco-bootstrap says; nothing is left of the run."""
    directory = model.parent / "run"
    answer = CliRunner().invoke(
        app, ["--from-checkpoint", str(model), "--state-dir", str(directory), *options]
    )
    assert answer.exit_code == 2
    assert "Traceback" not in answer.output
    assert not directory.exists()
    return " ".join(answer.output.split())


def test_without_a_tokenizer_only_a_vocabulary_of_256_is_bytes(tmp_path: Path) -> None:
    told = refusal(checkpoint(tmp_path / "bare", 320))
    assert "bare has no tokenizer.json, and its 320 tokens are not bytes. Name the tokenizer" in told
    (tmp_path / "tokenizer.json").write_bytes(bpe())
    named = RunOptions(from_checkpoint=str(tmp_path / "bare"), tokenizer=str(tmp_path / "tokenizer.json"))
    assert named.resolved()[0].data.tokenizer == identity_of(bpe())
    bytes_alone = checkpoint(tmp_path / "bytes", 256)
    manifest, raw = RunOptions(from_checkpoint=str(bytes_alone)).resolved()
    assert (manifest.data.tokenizer, raw) == (BYTES, None)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_model": "\n\x0e"},
        {"spiece_model": "\n\x0e"},
        {"tokenizer_model": "\n\x0e", "tokenizer_config_json": '{"tokenizer_class": "LlamaTokenizer"}'},
        {"vocab_txt": "[UNK]\na\n"},
        {"tekken_json": "{}"},
        vocab_and_merges(bpe()),
        {**vocab_and_merges(bpe()), "tokenizer_config_json": "{"},
        {**vocab_and_merges(bpe()), "tokenizer_config_json": '{"tokenizer_class": "LlamaTokenizer"}'},
        {
            "vocab_json": "{",
            "merges_txt": "",
            "tokenizer_config_json": '{"tokenizer_class": "GPT2Tokenizer"}',
        },
    ],
)
@pytest.mark.parametrize("vocab_size", [256, 320])
def test_files_in_another_form_that_cannot_be_converted_are_named(
    files: dict[str, str], vocab_size: int, tmp_path: Path
) -> None:
    told = refusal(checkpoint(tmp_path / "model", vocab_size, files))
    first = next(iter(files)).rpartition("_")
    assert f"model has {first[0]}.{first[2]}" in told
    assert "but no tokenizer.json" in told
    assert "save_pretrained(DIRECTORY); or name one with --tokenizer" in told


def test_the_checkpoints_own_tokenizer_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    own, other = bpe(), bpe(280)
    model = checkpoint(tmp_path / "model", 320, {"tokenizer_json": own.decode()})
    (tmp_path / "other.json").write_bytes(other)
    for named, taken in (("", own), (str(tmp_path / "other.json"), other)):
        manifest, raw = RunOptions(from_checkpoint=str(model), tokenizer=named).resolved()
        assert raw == taken
        assert manifest.data.tokenizer == identity_of(taken)


def test_files_whose_kind_the_folder_says_are_converted(tmp_path: Path) -> None:
    kind = '{"tokenizer_class": "GPT2Tokenizer"}'
    model = checkpoint(tmp_path / "gpt2", 320, {**vocab_and_merges(bpe()), "tokenizer_config_json": kind})
    manifest, raw = RunOptions(from_checkpoint=str(model)).resolved()
    assert raw is not None
    assert manifest.data.tokenizer == identity_of(raw)
    same = [FileTokenizer(each, END).encode_batch(TEXT)[0].tolist() for each in (raw, bpe())]
    assert same[0] == same[1]


def test_an_export_of_a_run_on_bytes_is_bytes_again(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "export", 256)
    tokenizer_of_run(micro_manifest(), None).save(model)
    assert RunOptions(from_checkpoint=str(model)).resolved()[1] is None


@pytest.mark.parametrize("is_special", [True, False])
def test_a_token_more_than_the_checkpoint_has_rows(
    is_special: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Tokenizer.from_str(bpe(300).decode())
    more = AddedToken("[PAD]", special=is_special)
    (made.add_special_tokens if is_special else made.add_tokens)([more])
    model = checkpoint(tmp_path / "pad", 300, {"tokenizer_json": made.to_str()})
    if is_special:  # no text becomes one
        with caplog.at_level(logging.WARNING):
            manifest, raw = RunOptions(from_checkpoint=str(model)).resolved()
        assert raw is not None
        assert "without a row in the model: 1, all of them special" in caplog.text
        (ids,) = FileTokenizer(raw, manifest.data.end_of_text).encode_batch(["a [PAD] b"])
        assert max(ids) < manifest.model.vocab_size == 300
    else:
        told = refusal(model)
        assert "The tokenizer has 301 tokens, the checkpoint 300." in told
        assert "model.resize_token_embeddings(301)" in told
        assert "vocab_size" not in told


def test_an_end_of_text_without_a_row_is_refused(tmp_path: Path) -> None:
    made = Tokenizer.from_str(bpe(300, special=()).decode())
    made.add_special_tokens(["</s>"])
    model = checkpoint(tmp_path / "end", 300, {"tokenizer_json": made.to_str()})
    assert "301 tokens, the checkpoint 300" in refusal(model)


def test_a_folder_named_with_tokenizer_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(TokenizerError, match=r"has tokenizer.model but no tokenizer.json"):
        RunOptions(tokenizer=str(tmp_path)).resolved()
