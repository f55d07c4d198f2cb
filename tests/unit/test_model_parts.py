"""The parts of taking a model out: tokens as text, choosing tokens and replicas, windows of text, the model card."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bootstrap.evaluation.measuring import Loss, text_of_files
from bootstrap.export.byte_tokenizer import byte_tokenizer
from bootstrap.export.checkpoint import Facts, model_card, weights_of, write_shards
from bootstrap.export.fetching import Donor, Source, choose
from bootstrap.export.order import shard_bytes
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.exported import tokenizer_in
from bootstrap.generation.swarm_answer import Sampler, left_in
from bootstrap.generation.writing import TextStream
from node.data.tokenizer import identity_of
from node.model.fragment import PIECE_PARAMETERS
from node.model.stage import parameter_count
from protocol.errors import DataError, TokenizerError, UserError
from protocol.ground import PeerId
from protocol.records.receipts import Contribution
from protocol.run.manifest import PRESETS, as_toml, load_preset, manifest_from
from protocol.version import own_version
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizers_made_here import bpe

BYTES = byte_tokenizer()


@given(st.text())
def test_any_text_becomes_its_utf8(text: str) -> None:
    assert BYTES.encode(text).ids == list(text.encode())


@given(st.binary(max_size=60))
def test_any_bytes_become_their_text(ids: bytes) -> None:
    assert BYTES.decode(list(ids), skip_special_tokens=False) == ids.decode(errors="replace")


def test_the_byte_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    tokenizer_of_run(micro_manifest(), None).save(tmp_path)
    loaded, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_in(tmp_path)
    assert ours.ids_of("a\0b") == list(b"ab")  # as of documents in training
    everything = "".join(map(chr, range(1, 0x500))) + " ' s 中文 🙂\r\n\t  x"
    assert ours.ids_of(everything) == list(everything.encode())
    assert loaded.decode(list(everything.encode())) == everything
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (0, 0, 256)
    assert ours.text_of(list(everything.encode())) == everything
    assert ours.byte_count([0xE4, 0xB8]) == 2
    assert loaded.model_max_length == ours.context == 32


def test_a_runs_own_tokenizer_goes_with_it_and_no_other_does(tmp_path: Path) -> None:
    own, other = bpe(), bpe(280)
    manifest = micro_manifest(
        data__tokenizer=identity_of(own), data__end_of_text="<|endoftext|>", model__vocab_size=300
    )
    tokenizer_of_run(manifest, own).save(tmp_path)
    loaded, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_in(tmp_path)
    text = "the cat, größer, 中文"
    assert loaded.decode(ours.ids_of(text)) == ours.text_of(ours.ids_of(text)) == text
    assert len(ours.ids_of(text)) < len(text.encode())
    assert loaded.eos_token == "<|endoftext|>"
    assert ours.end == loaded.eos_token_id
    assert ours.end not in ours.ids_of("what <|endoftext|> says")
    for wrong in (other, None):
        with pytest.raises(TokenizerError, match="tokenizer"):
            tokenizer_of_run(manifest, wrong)


@given(st.text(max_size=40))
def test_text_is_told_as_it_comes_and_characters_whole(text: str) -> None:
    told: list[str] = []
    stream = TextStream(tokenizer_of_run(micro_manifest(), None), told.append)
    for byte in text.encode():
        stream.put(byte)
    end = stream.end()
    assert "".join(told) == end == text.replace("\0", "")


def test_bytes_that_are_no_text_are_told_in_the_end() -> None:
    told: list[str] = []
    stream = TextStream(tokenizer_of_run(micro_manifest(), None), told.append)
    for byte in (0x61, 0xE4, 0xB8):
        stream.put(byte)
    assert told == ["a"]
    assert stream.end() == "a\ufffd" == "".join(told)


LOGITS = torch.tensor([1.0, 4.0, 3.0, 2.0, -5.0])


def test_greedy_takes_the_likeliest_and_sampling_what_is_left_in() -> None:
    assert Sampler(Decoding()).choose(LOGITS) == 1
    sampler = Sampler(Decoding(temperature=2.0, top_k=3, seed=5))
    drawn = [sampler.choose(LOGITS) for _ in range(200)]
    assert set(drawn) == {1, 2, 3}
    again = Sampler(Decoding(temperature=2.0, top_k=3, seed=5))
    assert drawn == [again.choose(LOGITS) for _ in range(200)]
    other = Sampler(Decoding(temperature=2.0, top_k=3, seed=6))
    assert drawn != [other.choose(LOGITS) for _ in range(200)]
    narrow = Sampler(Decoding(temperature=1.0, top_p=0.5))
    assert {narrow.choose(LOGITS) for _ in range(50)} == {1}


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(0.1, 3.0),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
)
def test_what_is_left_in_is_what_transformers_leaves_in(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    logits = torch.tensor(values)
    theirs = warpers(torch.empty(1, 0, dtype=torch.long), logits[None])[0]
    assert torch.equal(left_in(logits, Decoding(temperature=temperature, top_k=top_k, top_p=top_p)), theirs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"most_tokens": 0}, "--tokens"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": math.nan}, "--temperature"),
        ({"temperature": 1.0, "top_k": -1}, "--top-k"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p"),
        ({"top_k": 5}, "--temperature"),
    ],
)
def test_impossible_ways_to_choose(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Decoding(**settings)  # type: ignore[arg-type]


def donor(name: str, round_: int, is_finished: bool = False) -> Donor:
    return Donor(PeerId(name), round_ * 5, round_, is_finished)


def test_one_replica_is_taken_and_an_earlier_choice_kept_while_it_stands() -> None:
    donors = [donor("a", 3), donor("b", 4)]
    assert choose(donors, mean=False) == [donors[0]]
    assert choose(donors, mean=False, earlier=[["b", 4]]) == [donors[1]]
    assert choose(donors, mean=False, earlier=[["b", 3]]) == [donors[0]]
    assert choose(donors, mean=False, earlier=[["a", 3], ["b", 4]]) == [donors[0]]


def test_a_mean_is_over_the_largest_group_at_one_round() -> None:
    donors = [donor("a", 3), donor("b", 4), donor("c", 4), donor("d", 5), donor("e", 5)]
    assert choose(donors, mean=True) == donors[3:]
    assert choose(donors, mean=True, earlier=[["b", 4], ["c", 4]]) == donors[1:3]
    assert choose(donors, mean=True, earlier=[["a", 3]]) == donors[3:]
    done = [donor("a", 7, True), donor("b", 8, True), donor("c", 8)]
    assert choose(done, mean=True) == done[:2]


def test_sizes_of_files() -> None:
    assert shard_bytes("2GB") == 2 * 10**9
    assert shard_bytes("1.5 mb") == 1_500_000
    for wrong in ("2", "0GB", "-1GB", "large", ""):
        with pytest.raises(UserError, match="--shard-size 2GB"):
            shard_bytes(wrong)


def test_files_are_predicted_from_their_second_token_on(tmp_path: Path) -> None:
    tokenizer = tokenizer_of_run(micro_manifest(), None)
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("abcdefghij" * 2 + "ä")
    two.write_text("xyz")
    text = text_of_files([str(one), str(two)], "text", tokenizer, tokens=8, at_once=2)
    labels = [bytes(row.tolist()) for _, batch in text.batches for row in batch]
    assert b"".join(labels) == one.read_bytes()[1:] + b"yz"
    assert [inputs.shape[0] for inputs, _ in text.batches] == [2, 1, 1]
    assert text.bytes == 21 + 2
    assert text.sequences == 4
    assert text_of_files([str(one), str(two)], "text", tokenizer, 8, 2, limit=1).bytes == 8
    two.write_text("x")
    with pytest.raises(DataError, match="nothing to predict"):
        text_of_files([str(two)], "text", tokenizer, 8, 2)
    two.write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        text_of_files([str(two)], "text", tokenizer, 8, 2)


def test_what_a_loss_is_per_byte() -> None:
    loss = Loss(nats=math.log(2), tokens=100, bytes=400)
    assert loss.perplexity == pytest.approx(2)
    assert loss.bits_per_byte == pytest.approx(0.25)
    assert "perplexity 2.000, 0.2500 bits per byte, on 100 tokens (400 bytes)" in str(loss)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_manifest_is_read_back_from_its_text(preset: str) -> None:
    manifest = load_preset(preset)
    assert manifest_from(tomllib.loads(as_toml(manifest))) == manifest


def test_the_model_card_says_where_the_model_comes_from() -> None:
    manifest = micro_manifest()
    sources = [Source(0, 10, (donor("first", 3), donor("second", 3))), Source(1, 10, (donor("third", 4),))]
    facts = Facts(
        "0123", manifest, sources, 20, "bf16", tokens=1_234_567, training_loss=2.5, validation_loss=2.25
    )
    card = model_card(facts)
    for words in (
        "`0123`", "1,234,567", "2.5000", "2.2500", "bfloat16", "the mean of several", "[inner]",
        "| trained on | the .py files of the Python standard library |",
        "| 0 | `second` | 15 | 3 |", "| 1 | `third` | 20 | 4 |",
    ):  # fmt: skip
        assert words in card
    assert "Contributors" not in card
    front, manifest_text = card.split("---\n")[1], card.split("```toml\n")[1].split("```")[0]
    assert "library_name: transformers" in front
    assert manifest_from(tomllib.loads(manifest_text)) == manifest


def test_programs_are_told_the_same_as_readers_of_the_card() -> None:
    manifest, sources = (
        micro_manifest(),
        [Source(0, 10, (donor("first", 3),)), Source(1, 10, (donor("third", 4),))],
    )
    facts = Facts("0123", manifest, sources, 20, "bf16", tokens=77, training_loss=2.5, validation_loss=2.25)
    known = json.loads(facts.as_json())
    assert manifest_from(known.pop("manifest")) == manifest
    assert known == {
        "run": "0123",
        "name": "micro",
        "parameters": 20,
        "dtype": "bf16",
        "tokens": 77,
        "training_loss": 2.5,
        "validation_loss": 2.25,
        "stages": [
            {"stage": 0, "replicas": [{"peer": "first", "step": 15, "round": 3}]},
            {"stage": 1, "replicas": [{"peer": "third", "step": 20, "round": 4}]},
        ],
        "tokenizer_fingerprint": "",
        "program": own_version(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_taken_for_one_file_of_an_export(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is made of the weights, which are mapped from a file, is what goes into the next file."""
    held = list[int]()

    def noted(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, file, metadata)

    monkeypatch.setattr("bootstrap.export.checkpoint.save_file", noted)
    manifest, most = micro_manifest(), 5_000
    flats = [np.random.default_rng(s).random(parameter_count(manifest, s), np.float32) for s in range(2)]
    written = 0
    for name in write_shards(manifest, flats, tmp_path, dtype, most):
        if name.endswith(".safetensors"):
            written += 1
            assert len(held) == written, "each file is written before the next is made"
    largest = max(math.prod(weight.place.shape) for weight in weights_of(manifest).values()) * dtype.itemsize
    assert written > 4
    assert max(held) <= max(most, largest)
    assert sum(held) == dtype.itemsize * sum(flat.size for flat in flats)


def test_a_piece_is_a_megabyte() -> None:
    assert PIECE_PARAMETERS * torch.float32.itemsize == 2**20


def test_the_model_card_names_contributors_whatever_they_call_themselves() -> None:
    manifest, sources = micro_manifest(), [Source(0, 10, (donor("first", 3),))]
    some = [
        Contribution(PeerId("ann's"), "Ann | **B**\n", 900, 3, 2),
        Contribution(PeerId("bob's"), "", 100, 1, 1),
    ]
    many = [Contribution(PeerId(f"peer {n}"), "x", 10, 0, 1) for n in range(60)]
    card = model_card(Facts("0123", manifest, sources, 20, "bf16", contributions=some))
    assert "| Ann &#124; &#42;&#42;B&#42;&#42;&#10; | `ann's` | 900 |\n| - | `bob's` | 100 |" in card
    assert "| and 10 more | | 100 |" in model_card(
        Facts("0123", manifest, sources, 20, "bf16", contributions=many)
    )
