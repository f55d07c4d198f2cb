"""Tokenizers: text to ids and back, and every file that is not the run's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from node.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    end_of_text_in,
    identity_of,
    load_tokenizer,
)
from node.data.tokenizer_files import read_tokenizer
from protocol.errors import ManifestError, TokenizerError
from protocol.run.manifest import Manifest
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizers_made_here import TEXT, bpe, text_of

SPOKEN = "größer 中文 🙂\n\ttail  "


def manifest_with(raw: bytes, **changes: object) -> Manifest:
    settings = {
        "model__vocab_size": 320,
        "data__tokenizer": identity_of(raw),
        "data__end_of_text": "<|endoftext|>",
    }
    return micro_manifest(**{**settings, **changes})


@pytest.mark.parametrize("text", ["", "plain", *TEXT, SPOKEN])
def test_text_comes_back_from_its_ids(text: str) -> None:
    file = load_tokenizer(bpe(), manifest_with(bpe()))
    for raw, tokenizer in ((None, ByteTokenizer()), (bpe(), file)):
        ids, other = (part.tolist() for part in tokenizer.encode_batch([text, "b"]))
        assert (text_of(ids, raw), text_of(other, raw)) == (text, "b")
        assert all(0 <= token < tokenizer.size and token != tokenizer.end_of_text for token in ids)


def test_bytes_are_ids_and_a_nul_ends_no_text() -> None:
    tokenizer = load_tokenizer(None, micro_manifest())
    assert tokenizer.encode_batch(["é\0a"])[0].tolist() == [0xC3, 0xA9, ord("a")]


def test_text_that_reads_like_the_end_of_text_is_none() -> None:
    tokenizer = load_tokenizer(bpe(), manifest_with(bpe()))
    (ids,) = tokenizer.encode_batch(["a<|endoftext|>b"])
    assert tokenizer.end_of_text not in ids
    assert text_of(ids.tolist(), bpe()) == "a<|endoftext|>b"


def test_what_the_file_asks_for_truncation_and_padding_does_not_count() -> None:
    settings = json.loads(bpe())
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    raw = json.dumps(settings).encode()
    tokenizer = load_tokenizer(raw, manifest_with(raw))
    (ids,) = tokenizer.encode_batch([TEXT[0] * 5])
    assert text_of(ids.tolist(), raw) == TEXT[0] * 5
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    settings |= {"truncation": None, "padding": padding | {"pad_id": 1, "pad_type_id": 0, "pad_token": "!"}}
    raw = json.dumps(settings).encode()
    assert load_tokenizer(raw, manifest_with(raw)).encode_batch(["a"])[0].size == 1


def test_a_tokenizer_that_is_not_the_runs_is_refused_with_what_to_do() -> None:
    other = bpe(special=("<|endoftext|>", "<|more|>"))
    with pytest.raises(TokenizerError, match=r"not the tokenizer of run 'micro'.*--tokenizer"):
        load_tokenizer(other, manifest_with(bpe()))
    with pytest.raises(TokenizerError, match=r"no member.*--tokenizer FILE"):
        load_tokenizer(None, manifest_with(bpe()))
    with pytest.raises(TokenizerError, match=r"300 tokens, model.vocab_size is 299. Set"):
        load_tokenizer(bpe(), manifest_with(bpe(), model__vocab_size=299))
    with pytest.raises(TokenizerError, match=r"no token '</s>'.*--end-of-text"):
        load_tokenizer(bpe(), manifest_with(bpe(), data__end_of_text="</s>"))
    with pytest.raises(ManifestError, match="end_of_text"):
        manifest_with(bpe(), data__end_of_text="")
    with pytest.raises(ManifestError, match="tokenizer"):
        manifest_with(bpe(), data__tokenizer="/etc/passwd")


def test_files_that_are_no_tokenizer_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for raw, message in ((b"\xff\0", "not JSON"), (b"{", "not JSON"), (b'{"a": 1}', "not a tokenizer.*Give")):
        with pytest.raises(TokenizerError, match=message):
            FileTokenizer(raw, "<|endoftext|>")
    with pytest.raises(TokenizerError, match=r"missing.json \(No such file.*Check.*hub:"):
        read_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(TokenizerError, match=r"tokenizer.json \(No such file"):
        read_tokenizer(str(tmp_path))
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(64 * 1024 * 1024 + 1)
    with pytest.raises(TokenizerError, match="67,108,865 bytes"):
        read_tokenizer(str(huge))


def test_a_file_or_its_directory_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe())
    assert read_tokenizer(str(tmp_path)) == read_tokenizer(str(tmp_path / "tokenizer.json")) == bpe()


def in_the_cache(name: str, directory: Path, files: dict[str, str]) -> None:
    """A model of the hub as it lies on a disk once it was fetched."""
    model = directory / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file, contents in files.items():
        (snapshot / file).write_text(contents, encoding="utf-8")
    missing = model / ".no_exist" / ("a" * 40)
    missing.mkdir(parents=True)
    if "tokenizer.json" not in files:
        (missing / "tokenizer.json").touch()


def test_a_tokenizer_of_the_hub_is_its_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    in_the_cache("some/model", tmp_path, {"tokenizer.json": bpe().decode()})
    assert read_tokenizer("hub:some/model") == bpe()
    with pytest.raises(
        TokenizerError, match=r"Cannot get the tokenizer 'nobody/none'.*--tokenizer FILE"
    ) as refusal:
        read_tokenizer("hub:nobody/none")
    assert "\n" not in str(refusal.value)


def test_the_end_of_text_is_found_by_the_names_in_use() -> None:
    assert end_of_text_in(bpe(special=("<pad>", "</s>"))) == "</s>"
    names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
    for place, name in enumerate(names):
        assert end_of_text_in(bpe(special=names[: place - 1 : -1] if place else names[::-1])) == name
    with pytest.raises(TokenizerError, match=r"no end-of-text token.*--end-of-text"):
        end_of_text_in(bpe(special=()))
