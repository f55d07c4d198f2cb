"""What `noloco eval` counts: the ids that training makes, and the bytes of the text; an end of text is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from bootstrap.evaluation.measuring import WantedLosses, held_out_text, text_of_files
from bootstrap.export.tokenizer import ModelTokenizer, tokenizer_of_run
from node.data.batches import TrainingData
from node.data.documents import Split, cut
from node.data.opening import DataPlan, open_data
from node.data.tokenizer import Tokenizer as TrainingTokenizer
from node.data.tokenizer import identity_of, load_tokenizer
from protocol.errors import DataError
from protocol.run.manifest import Manifest
from tests.swarm.micro import MadeUpDocuments, micro_manifest, micro_text
from tests.unit.corpora import as_jsonl
from tests.unit.test_ways_to_name import FORMS
from tests.unit.tokenizers_made_here import bpe

TEXT = "First line.\n\nSecond paragraph here.\n\n\ndef f():\n    return 1\n\nThe end. größer 中文 🙂\n" * 20
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def pattern() -> bytes:
    """Split as for Llama 3 and Qwen: line ends and what is after them lie in one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("größer", normalized=False)])
    return str(tokenizer.to_str()).encode()


@cache
def spaces() -> bytes:
    """As sentencepiece's: a word's beginning is marked, and every text begins with a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return str(tokenizer.to_str()).encode()


KINDS: dict[str, Callable[[], bytes | None]] = {
    "bytes": lambda: None,
    "bpe": bpe,
    "pattern": pattern,
    "spaces": spaces,
}


def run_of(kind: str, **changes: object) -> tuple[Manifest, bytes | None]:
    raw = KINDS[kind]()
    changes |= {"data__source": "local"}
    if raw is not None:
        changes |= {"model__vocab_size": 512, "data__tokenizer": identity_of(raw)}
        changes |= {"data__end_of_text": "<|endoftext|>"}
    return micro_manifest(**changes), raw


@cache
def tokenizers_of(kind: str) -> tuple[ModelTokenizer, TrainingTokenizer]:
    """For evaluating and for training."""
    manifest, raw = run_of(kind)
    return tokenizer_of_run(manifest, raw), load_tokenizer(raw, manifest)


def ids_in(batches: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Of windows one after another: the first token, and all labels."""
    rows = [pair for inputs, labels in batches for pair in zip(inputs.tolist(), labels.tolist(), strict=True)]
    return [rows[0][0][0], *(token for _, labels in rows for token in labels)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [256, 16_384])
def test_a_file_has_the_ids_and_the_bytes_that_training_has(kind: str, longest: int, tmp_path: Path) -> None:
    manifest, raw = run_of(kind, data__longest_document=longest)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = tokenizer_of_run(manifest, raw)
    text = text_of_files([str(tmp_path / "a.txt")], "text", tokenizer, 16, 3, longest=longest)
    pieces = [piece.decode() for piece in cut([TEXT.encode()], longest)]
    trained = [i for ids in load_tokenizer(raw, manifest).encode_batch(pieces) for i in ids.tolist()]
    assert ids_in(text.batches) == trained
    first = tokenizer.byte_count(trained[:1])
    spaces_between = len(pieces) - 1 if kind == "spaces" else 0  # before the first word of each piece
    assert text.bytes == len(TEXT.encode()) - first + spaces_between


@pytest.mark.parametrize("form", FORMS)
def test_what_a_node_trains_on_can_be_measured_whole(form: str, tmp_path: Path) -> None:
    name, make = FORMS[form]
    texts = ["the first", "größer\n", "3"]
    file = tmp_path / name
    file.write_bytes(make(texts))
    for named in (str(file), str(tmp_path), f"{tmp_path}/*"):
        text = text_of_files([named], "text", tokenizers_of("bytes")[0], 16, 3)
        rows = [row.tolist() for inputs, _ in text.batches for row in inputs]
        assert sorted(map(bytes, rows)) == sorted(each.encode()[:-1] for each in texts if len(each) > 1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_of_text_has_no_bytes(kind: str, tmp_path: Path) -> None:
    """Rows that are about as long as the name of their end: as many bytes were counted for it as for them."""
    manifest, raw = run_of(kind)
    rows = [f"short row {number}" for number in range(4000)]
    place = as_jsonl(tmp_path / "rows.jsonl", rows)
    data = open_data(manifest, DataPlan((place,), "text", tmp_path / "cache"), raw)
    text = held_out_text(manifest, data, 1_000_000, tokenizer_of_run(manifest, raw))
    held_out = sum(len(row) for row in rows if Split(manifest.data.held_out).holds_out(row.encode()))
    assert held_out - 300 < text.bytes < held_out  # the last sequence may be incomplete, and is left out


@pytest.mark.parametrize(
    ("held_out", "wanted", "measured"), [(0.4, None, 256), (0.4, 10, 10), (0.02, None, 78)]
)
def test_without_data_it_is_256_sequences_that_the_run_holds_out(
    held_out: float, wanted: int | None, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [micro_text()[start : start + 100] for start in range(0, 100_000, 100)]
    documents = MadeUpDocuments(texts, Split(held_out))
    monkeypatch.setattr(
        "bootstrap.evaluation.measuring.tokenised_by", lambda reader, *_: TrainingData(documents, reader)
    )
    losses = WantedLosses((), "text", held_out=False, sequences=wanted, cache=tmp_path)
    manifest = micro_manifest()
    text = losses.text(manifest, *tokenizers_of("bytes")[::-1], 32, 8)
    assert text.sequences == measured
    held = b"\0".join(document.encode() for document in documents.held_out())
    rows = [row.tolist() for inputs, _ in text.batches for row in inputs]
    assert all(bytes(row) in held for row in rows)
    local = micro_manifest(data__source="local")
    with pytest.raises(DataError, match="volunteers' own text: name some with --data FILE"):
        losses.text(local, *tokenizers_of("bytes")[::-1], 32, 8)


@given(
    st.lists(st.sampled_from(["größer", " and", "中文", "\n\n", "word", " ", "🙂"]), max_size=12), st.data()
)
def test_the_bytes_of_parts_are_those_of_the_whole(words: list[str], data: st.DataObject) -> None:
    """Windows cut where they will, also within a character: for bytes under other names the sum is exact."""
    for kind in ("bytes", "bpe", "pattern"):
        tokenizer, trained = tokenizers_of(kind)
        (ids,) = (found.tolist() for found in trained.encode_batch(["".join(words)]))
        place = data.draw(st.integers(0, len(ids)))
        parts = [[*ids[:place], tokenizer.end], ids[place:]]
        assert sum(tokenizer.byte_count(part) for part in parts) == len("".join(words).encode())


def test_a_dataset_of_the_hub_is_measured_as_its_files_are(tmp_path: Path) -> None:
    manifest, raw = run_of("bytes")
    tokenizer = tokenizer_of_run(manifest, raw)
    as_jsonl(tmp_path / "train.jsonl", ["\ufeffthe first", "", "the second and the last"])
    texts = [
        text_of_files([entry], "text", tokenizer, 8, 2)
        for entry in (f"hub:{tmp_path}", str(tmp_path), str(tmp_path / "train.jsonl"))
    ]
    assert ids_in(texts[0].batches) == ids_in(texts[1].batches) == ids_in(texts[2].batches)
    assert len({text.bytes for text in texts}) == 1
    with pytest.raises(DataError, match="cannot be read beside others"):
        text_of_files(["hub:a/b", str(tmp_path)], "text", tokenizer, 8, 2)
