"""What a checkpoint says survives a run: exports have its small files, byte for byte unless the run changed them."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from bootstrap.creating.choosing import RunOptions
from bootstrap.export.carried import MOST_UNPACKED, NAMES, left_out_of, packed, unpacked
from bootstrap.export.checkpoint import Facts
from bootstrap.export.exporting import describe
from bootstrap.export.folder import WRITTEN
from bootstrap.generation.exported import tokenizer_in
from protocol.records.identity import Identity
from protocol.run.signed_manifest import SignedManifest
from protocol.run.start import MOST_FILES_BYTES
from tests.journeys.chat_model import CHAT, saved_chat_model
from tests.pretrained import saved_model
from tests.unit.tokenizers_made_here import bpe

SETTINGS = "tokenizer_config.json"


def chat_model(directory: Path) -> Path:
    """As people bring it: settings in their own order and spacing, generation settings, a token object."""
    saved_chat_model(directory)
    generation = {"temperature": 0.6, "eos_token_id": [0, 2], "top_p": 0.9, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    tokens = '{"eos_token": {"content": "<|endoftext|>", "lstrip": false}, "pad_token": "<|im_end|>"}'
    (directory / "special_tokens_map.json").write_text(tokens, encoding="utf-8")
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 0, "own": "größer"}
    (directory / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return directory


def exported(model: Path, directory: Path, dtype: str = "float32", **options: Any) -> Path:
    """An export of a run from the model that was founded, told to members, and not trained."""
    manifest, raw = RunOptions(from_checkpoint=str(model), **options).resolved()
    signed = SignedManifest.sign(manifest, Identity.from_seed("owner")).to_bytes()
    manifest = SignedManifest.from_bytes(signed).manifest
    directory.mkdir()
    describe(raw, directory, dtype, Facts("run", manifest, (), 1, dtype))
    for weights in model.glob("*.safetensors"):
        (directory / weights.name).write_bytes(weights.read_bytes())
    return directory


def sums(directory: Path) -> dict[str, str]:
    """The hashes of the files of a checkpoint."""
    ours = ("README.md", "noloco.json")
    files = [path for path in directory.iterdir() if path.is_file() and path.name not in ours]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def card(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8")


def test_an_export_has_the_files_of_the_checkpoint_and_so_has_the_next(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    first = exported(model, tmp_path / "first")
    assert sums(first) == sums(model)
    assert sums(exported(first, tmp_path / "second")) == sums(model)
    assert "as they are in `model`, byte for byte: config.json, generation_config.json" in card(first)
    assert "files = " not in card(first)
    assert {name for name in sums(first) if not name.endswith(".safetensors")} > set(NAMES) - {
        "added_tokens.json"
    }
    loaded = AutoTokenizer.from_pretrained(first)
    assert "größer" in loaded.apply_chat_template(CHAT, tokenize=False)
    assert AutoModelForCausalLM.from_pretrained(first).generation_config.top_p == 0.9


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_an_export_says_of_itself_is_said_by_the_next_one(family: Any, tmp_path: Path) -> None:
    saved_model(tmp_path / "bare", family, vocab_size=320)
    (tmp_path / "bare" / "tokenizer.json").write_bytes(bpe())
    first = exported(tmp_path / "bare", tmp_path / "first")
    assert sums(exported(first, tmp_path / "second")) == sums(first)
    bytes_alone = tmp_path / "bytes"
    saved_model(bytes_alone, family)
    first = exported(bytes_alone, tmp_path / "third")
    assert sums(exported(first, tmp_path / "fourth")) == sums(first)


def test_the_type_of_the_numbers_is_the_exports(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    export = exported(model, tmp_path / "export", "bfloat16")
    was, now = (json.loads((folder / "config.json").read_text("utf-8")) for folder in (model, export))
    assert now == was | {"dtype": "bfloat16"}
    assert {name for name in sums(model) if sums(model)[name] != sums(export)[name]} == {"config.json"}
    assert "- config.json but for the type of the numbers" in card(export)


def test_an_end_that_the_founder_chose_is_in_all_files_and_the_card_says_so(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    export = exported(model, tmp_path / "export", end_of_text="<|im_start|>")
    loaded = AutoTokenizer.from_pretrained(export)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|im_start|>", 1)
    kept = {name: json.loads((export / name).read_text("utf-8")) for name in NAMES[:4]}
    assert kept["special_tokens_map.json"]["eos_token"] == {"content": "<|im_start|>", "lstrip": False}
    assert (kept["config.json"]["eos_token_id"], kept["generation_config.json"]["eos_token_id"]) == (1, 1)
    assert kept["generation_config.json"]["top_p"] == 0.9
    for name in kept:
        assert f"- {name} but for the end of a text" in card(export)
    assert sums(export)["tokenizer.json"] == sums(model)["tokenizer.json"]


def test_with_another_tokenizer_an_export_has_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(bpe(310))
    export = exported(
        chat_model(tmp_path / "model"), tmp_path / "export", tokenizer=str(tmp_path / "other.json")
    )
    assert "own" not in json.loads((export / "config.json").read_text("utf-8"))
    assert "- only in `model`, not carried here: config.json, generation_config.json, " in card(export)
    assert "chat_template.jinja" in card(export)
    assert not (export / "chat_template.jinja").exists()


def test_a_config_json_that_the_founding_corrects_keeps_all_else_that_it_says(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    said = {"tie_word_embeddings": True, "bos_token_id": 7, "pad_token_id": 9, "own": "words"}
    was = json.loads(config.read_text()) | said
    config.write_text(json.dumps(was))
    export = exported(tmp_path / "model", tmp_path / "export")  # whose head differs: the run is not tied
    assert json.loads((export / "config.json").read_text()) == was | {"tie_word_embeddings": False}
    assert "- config.json but for tie_word_embeddings" in card(export)


BESIDE = (
    "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json",
    "merges.txt", "modeling_own.py", "preprocessor_config.json", "tokenizer.model", "vocab.json",
)  # fmt: skip


def test_what_no_export_carries_is_named_at_the_founding_and_in_the_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = chat_model(tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    for name in (*BESIDE, "README.md", "LICENSE", "training_args.bin"):
        (model / name).write_text("{}")
    export = exported(model, tmp_path / "export")
    listed = ", ".join(BESIDE)
    assert f"that exports will not have, and that their model cards name: {listed}." in caplog.text
    assert f"- only in `model`, not carried here: {listed}\n" in card(export)
    assert sums(export).keys() == sums(model).keys() - {*BESIDE, "LICENSE", "training_args.bin"}


def test_what_a_manifest_has_no_room_for_is_left_out_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = chat_model(tmp_path / "model")
    noise = hashlib.shake_256(b"noise").hexdigest(MOST_FILES_BYTES)
    settings = json.loads((model / SETTINGS).read_text("utf-8")) | {"noise": noise}
    (model / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    export = exported(model, tmp_path / "export")
    assert f"The manifest has no room for {SETTINGS} of" in caplog.text
    assert f"not carried here: {SETTINGS}\n" in card(export)
    assert {name for name in sums(model) if sums(model)[name] != sums(export).get(name)} == {SETTINGS}


def test_the_settings_of_a_large_tokenizer_have_room() -> None:
    """Mistral's have 140 kB, nearly all of it rows of reserved tokens."""
    rows = {
        str(i): {"content": f"[control_{i}]", "lstrip": False, "normalized": False, "special": True}
        for i in range(1_500)
    }
    raw = json.dumps({"added_tokens_decoder": rows}, indent=2).encode()
    assert len(raw) > 150_000
    text, left_out = packed({SETTINGS: raw})
    assert (unpacked(text), left_out) == ({SETTINGS: raw}, [])


def test_training_puts_nothing_around_a_text_whatever_the_carried_tokenizer_does(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    adding = Tokenizer.from_file(str(model / "tokenizer.json"))
    adding.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    adding.save(str(model / "tokenizer.json"))
    export = exported(model, tmp_path / "export")
    assert sums(export) == sums(model)
    loaded = AutoTokenizer.from_pretrained(export)
    alone = tokenizer_in(export).ids_of("the cat")
    assert loaded("the cat").input_ids == [1, *alone]
    assert loaded("the cat", add_special_tokens=False).input_ids == alone


def wrapped(contents: object) -> str:
    return base64.b64encode(zlib.compress(msgpack.packb(contents))).decode()


@pytest.mark.parametrize(
    "text",
    [
        "", "AAAA", "x", wrapped([1]), wrapped(3), wrapped({"../evil": b"x"}), wrapped({SETTINGS: 3}),
        wrapped({1: b"x"}), wrapped({"config.json": bytes(MOST_UNPACKED * 4)}),
        base64.b64encode(zlib.compress(b"\xc1")).decode(), wrapped({"model.safetensors": b"x"}),
        wrapped({"left-out": b"`<script>`\n" + b"x" * 200 + b"\n\xff"}), wrapped({"left-out": 3}),
    ],
)  # fmt: skip
def test_what_a_stranger_packed_leads_nowhere(text: str) -> None:
    assert unpacked(text) == {}
    assert left_out_of(text) == []


def test_a_stranger_names_so_many_files_and_no_more() -> None:
    assert len(left_out_of(wrapped({"left-out": b"\n".join(b"%d.py" % n for n in range(10_000))}))) == 20


def test_the_names_are_those_that_an_export_may_write() -> None:
    assert all(WRITTEN.fullmatch(name) for name in NAMES)
