"""Every kind of tokenizer at what training, evaluation, generation and export promise of it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from bootstrap.creating.choosing import with_tokenizer
from bootstrap.creating.probing import probe
from bootstrap.export.tokenizer import fingerprint_of, tokenizer_of_run
from bootstrap.generation.exported import tokenizer_in
from bootstrap.generation.writing import TextStream
from node.data.tokenizer import FileTokenizer
from protocol.errors import DataError, TokenizerError
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizer_kinds import END, ENDS, FALLING_BACK, MODELS, Kind, with_settings
from tests.unit.tokenizers_made_here import bpe

KINDS = [
    Kind(model, has_unknown, end, adds)
    for model, has_unknown, end, adds in product(MODELS, (True, False), ENDS, (False, True))
]
FROM_TEXT = (
    "the cat sat on the mat",
    "a</s>b",
    "the </s> cat",
    "</s>",
    "<s>a</s> <unk>",
    " </s></s> ",
    "＜/s＞ </S>",
)
KEEPING = ("BPE of bytes", *FALLING_BACK)


def keeps(kind: Kind) -> bool:
    """Whether it writes any text. The library's Unigram looks at bytes only where it has an unknown token."""
    return kind.model in KEEPING and (kind.has_unknown or not kind.model.startswith("Unigram"))


def name(kind: Kind) -> str:
    unknown, adds = "with" if kind.has_unknown else "without", ", adds" if kind.adds else ""
    return f"{kind.model} {unknown} unknown, end {kind.end}{adds}"


def ids_or_none(tokenizer: FileTokenizer, text: str) -> list[int] | None:
    try:
        ids: list[int] = tokenizer.encode_batch([text])[0].tolist()
    except DataError:
        return None
    return ids


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_what_a_tokenizer_does_not_keep_is_told_at_founding(kind: Kind) -> None:
    raw = kind.file()
    if keeps(kind):
        assert "no token" not in probe(raw, END)
    elif kind.has_unknown:
        assert "what it has no token for, as 'größer'" in probe(raw, END)
        assert "becomes <unk>" in probe(raw, END)
    else:
        lost = "would vanish from documents" if kind.model == "BPE" else "training would end at"
        with pytest.raises(
            TokenizerError, match=rf"no token for some text, as '.*{lost}.*another --tokenizer"
        ):
            probe(raw, END)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_no_text_ends_a_document_and_all_other_ids_stay(kind: Kind) -> None:
    raw = kind.file()
    tokenizer, file = FileTokenizer(raw, END), Tokenizer.from_str(raw.decode())
    assert tokenizer.end_of_text == file.token_to_id(END)
    for text in FROM_TEXT:
        ids = ids_or_none(tokenizer, text)
        if ids is None:  # founding refuses such a tokenizer
            assert not kind.has_unknown
            continue
        assert tokenizer.end_of_text not in ids
        assert all(0 <= token < tokenizer.size for token in ids)
        if "<" not in text and (kind.has_unknown or keeps(kind)):
            assert ids == file.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.has_unknown or keeps(kind)], ids=name)
def test_an_export_says_of_text_what_training_did(kind: Kind, tmp_path: Path) -> None:
    raw = kind.file()
    manifest = with_tokenizer(micro_manifest(model__vocab_size=320), raw)
    tokenizer_of_run(manifest, raw).save(tmp_path)
    loaded, trained = AutoTokenizer.from_pretrained(tmp_path), FileTokenizer(raw, END)
    for text in FROM_TEXT:
        ids = trained.encode_batch([text])[0].tolist()
        assert tokenizer_in(tmp_path).ids_of(text) == ids
        if "<" not in text and "S" not in text:
            assert loaded(text).input_ids == ids
    assert fingerprint_of(manifest, (tmp_path / "tokenizer.json").read_bytes()) == fingerprint_of(
        manifest, raw
    )


@pytest.mark.parametrize(
    "raw",
    [None, bpe(), Kind("Unigram that falls back", has_unknown=True).file()],
    ids=["bytes", "bpe", "pieces"],
)
def test_the_name_of_a_special_token_is_one_for_transformers_and_text_for_us(
    raw: bytes | None, tmp_path: Path
) -> None:
    manifest = micro_manifest() if raw is None else with_tokenizer(micro_manifest(model__vocab_size=320), raw)
    tokenizer_of_run(manifest, raw).save(tmp_path)
    loaded, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_in(tmp_path)
    assert loaded.eos_token_id == ours.end
    text = f"a{loaded.eos_token}b"
    assert loaded.eos_token_id in loaded(text).input_ids
    assert loaded.eos_token_id not in ours.ids_of(text)
    if raw is not None:
        assert ours.ids_of(text) == FileTokenizer(raw, loaded.eos_token).encode_batch([text])[0].tolist()


@pytest.mark.parametrize("model", KEEPING)
def test_prompt_and_answer_joined_are_the_models_text(model: str) -> None:
    raw = Kind(model, has_unknown=True).file()
    manifest = with_tokenizer(micro_manifest(model__vocab_size=320), raw)
    tokenizer = tokenizer_of_run(manifest, raw)
    for prompt, answer in (("the", " cat sat"), ("th", "at cat"), ("größer ", "🙂 ist"), ("the\n", "  cat")):
        ids, told = tokenizer.ids_of(prompt + answer), list[str]()
        begin = tokenizer.ids_of(prompt)
        common = next(n for n in range(len(begin), -1, -1) if ids[:n] == begin[:n])
        stream = TextStream(tokenizer, told.append, ids[:common])
        for token in ids[common:]:
            stream.put(token)
        stream.end()
        assert tokenizer.text_of(ids[:common]) + "".join(told) == prompt + answer


@pytest.mark.parametrize("model", ["BPE", "Unigram", "WordPiece", "WordLevel"])
def test_an_end_of_text_that_stands_for_the_unknown_ends_no_document(model: str) -> None:
    raw = Kind(model, has_unknown=True).file()
    settings = json.loads(raw)["model"]
    end = Tokenizer.from_str(raw.decode()).token_to_id(END)
    raw = with_settings(raw, **({"unk_id": end} if "unk_id" in settings else {"unk_token": END}))
    with pytest.raises(TokenizerError, match=r"unknown token \(not the end of text\)"):
        probe(raw, END)


def test_an_end_of_text_that_stands_for_the_unknown_is_taken_where_nothing_is_unknown() -> None:
    raw = with_settings(bpe(), unk_token="<|endoftext|>")
    assert probe(raw, "<|endoftext|>") == ""


def test_a_byte_that_is_missing_is_found() -> None:
    for lost, shown in (("Į", "Ì"), ("A", "A"), ("ð", "🙂")):  # the bytes 8C, 41 and F0
        settings = json.loads(bpe())
        vocabulary = settings["model"]["vocab"]
        vocabulary[f"<{lost}>"] = vocabulary.pop(lost)
        settings["model"]["merges"] = [
            pair for pair in settings["model"]["merges"] if lost not in "".join(pair)
        ]
        with pytest.raises(TokenizerError, match=rf"'{shown}'.*would vanish from documents.*all 256 bytes"):
            probe(json.dumps(settings).encode(), "<|endoftext|>")
    assert probe(bpe(), "<|endoftext|>") == ""


def test_rules_of_writing_and_a_missing_decoder_are_told() -> None:
    lower = json.loads(bpe()) | {"normalizer": {"type": "Lowercase"}}
    assert "upper case is lost" in probe(json.dumps(lower).encode(), "<|endoftext|>")
    for rule, said in (
        ([{"type": "NFD"}, {"type": "StripAccents"}], "accents are lost"),
        ([{"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}], "white space is lost"),
    ):
        ruled = json.loads(bpe()) | {"normalizer": {"type": "Sequence", "normalizers": rule}}
        assert said in probe(json.dumps(ruled).encode(), "<|endoftext|>")
    joined = json.loads(bpe()) | {"decoder": None}
    assert "does not come back" in probe(json.dumps(joined).encode(), "<|endoftext|>")


def test_dropout_of_a_file_does_not_count() -> None:
    raw = with_settings(bpe(), dropout=0.5)
    tokenizer = FileTokenizer(raw, "<|endoftext|>")
    texts = ["the cat sat on the mat"] * 8
    assert len({tuple(ids.tolist()) for ids in tokenizer.encode_batch(texts)}) == 1


def test_a_text_that_cannot_be_written_is_shown() -> None:
    tokenizer = FileTokenizer(Kind("Unigram", has_unknown=False).file(), END)
    assert tokenizer.encode_batch(["the cat"])[0].size
    with pytest.raises(DataError, match=r"cannot write the text that begins 'größer'.*Leave it out"):
        tokenizer.encode_batch(["the cat", "größer"])
