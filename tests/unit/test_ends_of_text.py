"""The end of a text is the one that a checkpoint says, by id or by name; where its files disagree a line tells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bootstrap.creating.choosing import RunOptions
from protocol.errors import TokenizerError
from tests.pretrained import saved_model
from tests.unit.tokenizers_made_here import bpe

OWN, TURN, SLASH = "<｜end▁of▁sentence｜>", "<|im_end|>", "</s>"
SPECIAL = ("<|endoftext|>", TURN, SLASH, OWN, "<|begin|>")  # with the ids 0 to 4
TOKENIZER, MAP, GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"


def checkpoint(directory: Path, files: dict[str, dict[str, Any]], special: tuple[str, ...] = SPECIAL) -> Path:
    """One whose files say the end of a text as given, and no others."""
    saved_model(directory, vocab_size=320, max_position_embeddings=256)
    (directory / "tokenizer.json").write_bytes(bpe(320, special))
    (directory / GENERATION).unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    for name in ("eos_token_id", "bos_token_id"):
        config.pop(name, None)
    for name, contents in {"config.json": {}, **files}.items():
        merged = config | contents if name == "config.json" else contents
        (directory / name).write_text(json.dumps(merged), encoding="utf-8")
    return directory


def end_of(directory: Path, **options: Any) -> str:
    manifest, _ = RunOptions(from_checkpoint=str(directory), **options).resolved()
    return manifest.data.end_of_text


AGREED: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "by id": ({"config.json": {"eos_token_id": 3}}, OWN),
    "by a list": ({"config.json": {"eos_token_id": [2, 3]}}, SLASH),
    "by generation alone": ({GENERATION: {"eos_token_id": 1}}, TURN),
    "by name": ({TOKENIZER: {"eos_token": OWN}}, OWN),
    "by an object": ({TOKENIZER: {"eos_token": {"content": SLASH, "special": True}}}, SLASH),
    "by the map": ({MAP: {"eos_token": TURN}}, TURN),
    "by the map's object": ({MAP: {"eos_token": {"content": TURN, "lstrip": False}}}, TURN),
    "id and name": ({"config.json": {"eos_token_id": 2}, TOKENIZER: {"eos_token": SLASH}}, SLASH),
    "a name in the lists": (
        {
            "config.json": {"eos_token_id": [0, 1, 3]},
            GENERATION: {"eos_token_id": [1, 0]},
            TOKENIZER: {"eos_token": TURN},
        },
        TURN,
    ),
    "one of a list in both": (
        {"config.json": {"eos_token_id": 1}, GENERATION: {"eos_token_id": [0, 1]}},
        TURN,
    ),
    "none": ({}, "<|endoftext|>"),
    "nulls": (
        {
            "config.json": {"eos_token_id": None},
            GENERATION: {"eos_token_id": None},
            TOKENIZER: {"eos_token": None},
            MAP: {"eos_token": None},
        },
        "<|endoftext|>",
    ),
}
TOLD: dict[str, tuple[dict[str, dict[str, Any]], str, str]] = {
    "name against id": (
        {"config.json": {"eos_token_id": 0}, TOKENIZER: {"eos_token": TURN}},
        TURN,
        r"config\.json says <\|endoftext\|>",
    ),
    "name against name": (
        {TOKENIZER: {"eos_token": SLASH}, MAP: {"eos_token": OWN}},
        SLASH,
        rf"special_tokens_map\.json says {OWN}",
    ),
    "id against id": (
        {"config.json": {"eos_token_id": 1}, GENERATION: {"eos_token_id": [2, 3]}},
        TURN,
        rf"generation_config\.json says </s> or {OWN}",
    ),
    "a piece of text": ({"config.json": {"eos_token_id": 70}}, "<|endoftext|>", "gives 70, which is '.', a piece"),
    "no token at all": ({GENERATION: {"eos_token_id": 9_999}}, "<|endoftext|>", "gives 9999, which the tokenizer"),
    "a name that is none": (
        {TOKENIZER: {"eos_token": "<|none|>"}},
        "<|endoftext|>",
        r"tokenizer_config\.json names '<\|none\|>', which the tokenizer does not have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AGREED)
def test_the_end_is_the_one_that_the_files_say(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, end = AGREED[case]
    assert end_of(checkpoint(tmp_path / "model", files)) == end
    assert "do not agree" not in caplog.text


@pytest.mark.parametrize("case", TOLD)
def test_where_they_disagree_a_line_tells_and_an_option_is_the_way(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, end, words = TOLD[case]
    model = checkpoint(tmp_path / "model", files)
    assert end_of(model) == end
    [told] = [record.getMessage() for record in caplog.records if "do not agree" in record.getMessage()]
    assert told.startswith(f"{end} ends a text in this run.")
    assert re.search(words, told), told
    assert told.endswith("--end-of-text TOKEN takes another.")
    caplog.clear()
    assert end_of(model, end_of_text=OWN) == OWN
    assert "do not agree" not in caplog.text


def test_an_end_that_only_the_files_know_is_taken_and_none_is_refused(tmp_path: Path) -> None:
    special = ("<|begin|>", OWN)
    named = checkpoint(tmp_path / "named", {TOKENIZER: {"eos_token": OWN}}, special)
    assert end_of(named) == OWN
    with pytest.raises(TokenizerError, match="has no end-of-text token"):
        end_of(checkpoint(tmp_path / "none", {}, special))


def test_a_tokenizer_that_is_named_brings_its_end_with_it(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", {TOKENIZER: {"eos_token": TURN}})
    other = checkpoint(tmp_path / "other", {TOKENIZER: {"eos_token": SLASH}})
    for named in (other, other / "tokenizer.json"):
        assert end_of(model, tokenizer=str(named)) == SLASH
    (tmp_path / "alone.json").write_bytes(bpe(320, SPECIAL))
    assert end_of(model, tokenizer=str(tmp_path / "alone.json")) == "<|endoftext|>"
