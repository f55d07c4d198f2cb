"""Documents: where they come from, how they are cut, ordered, held out and packed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.config import NodeConfig
from node.data.batches import TokenisingTally, packed_once, sequences, shuffled, window_bytes
from node.data.documents import DocumentOrder, Split, StoredDocuments, content_hash, cut, stored_documents
from node.data.opening import DataPlan, open_data
from node.data.tokenizer import ByteTokenizer, Ids, identity_of, load_tokenizer
from node.membership.data_source import DataSupply
from node.storage.position import Position
from node.storage.state_directory import StateDirectory
from node.watch.events import Events
from protocol.run.manifest import BYTES, Manifest, manifest_from
from protocol.windows import amount
from tests.swarm.micro import micro_manifest
from tests.unit import corpora
from tests.unit.tokenizers_made_here import bpe, text_of

HALF = Split(0.5)
DOCUMENTS = corpora.made_up(60)


def stored(tmp_path: Path, *entries: str, field: str = "text", longest: int = 16_384) -> StoredDocuments:
    return stored_documents(entries, field, longest, HALF, tmp_path / "cache")


def run_with(raw: bytes | None = None, **changes: object) -> Manifest:
    if raw is not None:
        changes |= {"model__vocab_size": 320, "data__tokenizer": identity_of(raw)}
        changes |= {"data__end_of_text": "<|endoftext|>"}
    return micro_manifest(**{"data__source": "local", **changes})


def plan(tmp_path: Path, *entries: str) -> DataPlan:
    return DataPlan(entries, "text", tmp_path / "cache")


# --- the same, however it is stored -------------------------------------------------------------


@pytest.mark.parametrize("raw", [None, bpe()], ids=["bytes", "bpe"])
def test_the_format_of_the_files_does_not_change_one_token(raw: bytes | None, tmp_path: Path) -> None:
    manifest = run_with(raw)
    entries = [
        corpora.as_text(tmp_path / "texts", DOCUMENTS),
        corpora.as_jsonl(tmp_path / "lines.jsonl", DOCUMENTS),
        corpora.as_jsonl(tmp_path / "lines.jsonl.gz", DOCUMENTS),
        corpora.as_parquet(tmp_path / "rows.parquet", DOCUMENTS),
        corpora.as_hub_layout(tmp_path / "dataset", DOCUMENTS),
        corpora.as_saved_to_disk(tmp_path / "saved", DOCUMENTS),
        corpora.as_jsonl(tmp_path / "other-order.jsonl", DOCUMENTS[::-1]),
    ]
    streams, held_out = [], []
    for entry in entries:
        data = open_data(manifest, plan(tmp_path, entry), raw)
        line = data.batches("run", "peer", manifest, Position(data.identity))
        streams.append(
            [(batch[0].tolist(), batch[1].tolist(), position) for batch, position in islice(line, 500)]
        )
        held_out.append([batch[0].tolist() for batch in data.validation_batches(32, 2)])
    assert {stream[-1][2].epoch for stream in streams} != {0}  # more than one epoch was compared
    assert all(stream == streams[0] for stream in streams)
    assert all(part == held_out[0] for part in held_out)


def test_fields_may_have_other_names_and_empty_ones_are_passed_over(tmp_path: Path) -> None:
    documents = ["one", "", "two"]
    for entry in (
        corpora.as_jsonl(tmp_path / "a.jsonl", documents, "body"),
        corpora.as_parquet(tmp_path / "a.parquet", documents, "body"),
    ):
        found = stored(tmp_path, entry, field="body")
        assert sorted([*found.training((), 0, 0), *found.held_out()]) == ["one", "two"]


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("first", "and then"):
        path.write_text(text)
        found = stored(tmp_path, str(path))
        assert [*found.training((), 0, 0), *found.held_out()] == [text]


def test_the_store_holds_the_text_once_and_24_bytes_for_a_document(tmp_path: Path) -> None:
    entry = corpora.as_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    found = stored(tmp_path, entry)
    (place,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert (place / "text.bin").read_bytes() == "".join(DOCUMENTS).encode()
    assert (place / "index.bin").stat().st_size == 24 * len(DOCUMENTS)
    text = sum(len(document.encode()) for document in DOCUMENTS)
    assert f"Index: {amount(24 * len(DOCUMENTS))} | Text: {amount(text)}" in repr(found)


def test_a_store_is_made_once_for_all_who_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = corpora.as_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    made = stored(tmp_path, entry)

    def read_again(places: object, field: str) -> Iterator[object]:
        raise AssertionError("the files were read a second time")

    monkeypatch.setattr("node.data.documents.documents_in", read_again)
    assert list(stored(tmp_path, entry).held_out()) == list(made.held_out())


def test_a_store_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    entry = corpora.as_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    before = stored(tmp_path, entry)
    expected = list(before.training((), 0, 0))
    shutil.rmtree(tmp_path / "cache")
    assert list(before.training((), 0, 0)) == expected  # who trains on it has it still
    assert list(stored(tmp_path, entry).training((), 0, 0)) == expected


@pytest.mark.parametrize("named", [False, True])
async def test_documents_are_kept_in_the_state_directory_unless_another_place_is_named(
    named: bool, tmp_path: Path
) -> None:
    (state := StateDirectory(tmp_path / "state")).open()
    cache = tmp_path / "elsewhere" if named else None
    config = NodeConfig(data=(corpora.as_jsonl(tmp_path / "a.jsonl", DOCUMENTS),), data_cache=cache)
    supply = DataSupply(config, run_with(), state, Events(lambda: 0.0, lambda _: None))
    await supply.open(None)
    state.close()
    places = (tmp_path / "state" / "documents", tmp_path / "elsewhere")
    assert [place.exists() for place in places] == [not named, named]


# --- cutting and holding out --------------------------------------------------------------------


@given(st.text(alphabet="ab\n ü中🙂", max_size=200), st.integers(4, 40), st.integers(1, 50))
def test_cutting_loses_only_white_space_and_does_not_depend_on_blocks(
    text: str, longest: int, block: int
) -> None:
    raw = text.encode()
    pieces = list(cut([raw], longest))
    assert pieces == list(cut([raw[i : i + block] for i in range(0, len(raw), block)], longest))
    assert all(len(piece) <= longest and piece.strip() and piece.decode() for piece in pieces)
    rest = raw
    for piece in pieces:
        assert not rest[: rest.index(piece)].strip()
        rest = rest[rest.index(piece) + len(piece) :]
    assert not rest.strip()


def test_long_texts_are_cut_at_line_ends() -> None:
    lines = [b"x" * 30 + b"\n"] * 10
    assert list(cut([b"".join(lines)], 100)) == [b"".join(lines[:3])] * 3 + [lines[0]]


def test_a_manifest_cuts_at_16_kib_and_shuffles_eight_million_tokens_unless_it_says_otherwise() -> None:
    data = manifest_from({**run_with().model_dump(), "data": {"source": "local", "sequence_tokens": 32}}).data
    assert (data.longest_document, data.shuffle_window) == (16 * 1024, 2**23)
    assert data.tokenizer == BYTES


def test_a_document_and_its_copies_are_on_one_side_for_every_volunteer(tmp_path: Path) -> None:
    mine = corpora.as_jsonl(tmp_path / "mine.jsonl", DOCUMENTS + DOCUMENTS[:20])
    theirs = corpora.as_text(
        tmp_path / "theirs", [d.strip() for d in DOCUMENTS[10:]] + corpora.made_up(30, seed=1)
    )
    trained, held_out = set[str](), set[str]()
    for entry in (mine, theirs):
        found = stored(tmp_path, entry)
        trained |= {text.strip() for text in found.training((), 0, 0)}
        held_out |= {text.strip() for text in found.held_out()}
    assert not trained & held_out
    assert {d.strip() for d in DOCUMENTS} <= trained | held_out
    assert len(trained) > 20 < len(held_out)


def test_the_held_out_fraction_is_that_of_the_manifest() -> None:
    held_out = sum(Split(0.1).holds_out(f"document {number}".encode()) for number in range(5_000))
    assert held_out == pytest.approx(500, abs=5 * (5_000 * 0.09) ** 0.5)
    assert content_hash(b" a\n") == content_hash(b"a") != content_hash(b"b")


# --- the order ----------------------------------------------------------------------------------


@given(st.integers(1, 2_000), st.integers(0, 5))
def test_an_order_has_every_number_once(count: int, seed: int) -> None:
    order = DocumentOrder(count, ("seed", seed))
    assert sorted(order[place] for place in range(count)) == list(range(count))


def test_an_order_of_any_size_begins_anywhere_at_once() -> None:
    order = DocumentOrder(10**15, ("seed",))
    numbers = [order[place] for place in (0, 1, 10**14, 10**15 - 1)]
    assert len(set(numbers)) == 4
    assert all(0 <= number < 10**15 for number in numbers)


def test_orders_differ_and_look_random() -> None:
    count = 4_096
    orders = [[DocumentOrder(count, (seed,))[place] for place in range(count)] for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]
    for order in orders:
        assert sum(n == place for place, n in enumerate(order)) < 10  # one is expected
        steps = Counter((b - a) % count for a, b in pairwise(order))
        assert max(steps.values()) < 12


def test_peers_train_on_the_same_documents_in_orders_of_their_own(tmp_path: Path) -> None:
    found = stored(tmp_path, corpora.as_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    orders = [list(found.training(("run", peer), epoch, 0)) for peer in ("a", "b") for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({tuple(sorted(order)) for order in orders}) == 1


# --- packing ------------------------------------------------------------------------------------


def read(documents: list[str]) -> object:
    def documents_of(epoch: int, first: int) -> Iterator[str]:
        order = DocumentOrder(len(documents), ("order", epoch))
        return (documents[order[place]] for place in range(first, len(documents)))

    return documents_of


def line_from(position: Position, tokens: int = 16, documents: list[str] = DOCUMENTS):  # type: ignore[no-untyped-def]
    return sequences(read(documents), ByteTokenizer(), tokens, position, TokenisingTally())  # type: ignore[arg-type]


def test_sequences_overlap_by_the_label_and_hold_every_document_once_with_its_end() -> None:
    documents, rows = DOCUMENTS[:10], []
    for ids, position in line_from(Position("c"), documents=documents):
        rows.append(ids)
        if position.epoch == 2:
            break
    assert all(a[-1] == b[0] for a, b in pairwise(rows))
    text = bytes(token for row in rows for token in row[:-1].tolist()).decode(errors="ignore")
    whole = text.split("\0")[:20]
    assert sorted(whole[:10]) == sorted(whole[10:]) == sorted(documents)
    assert whole[:10] != whole[10:]


def test_stopping_and_going_on_anywhere_gives_the_same_sequences() -> None:
    rng, whole = random.Random(3), list(islice(line_from(Position("c"), documents=DOCUMENTS[:15]), 1_000))
    assert whole[-1][1].epoch >= 2
    parts: list[object] = []
    position = Position("c")
    while len(parts) < 1_000:
        # a life of this node
        part = list(islice(line_from(position, documents=DOCUMENTS[:15]), rng.randint(1, 90)))
        position = part[-1][1]
        parts += [(ids.tolist(), after) for ids, after in part]
    assert parts[:1_000] == [(ids.tolist(), after) for ids, after in whole]


def test_the_sequences_of_a_step_are_of_many_documents(tmp_path: Path) -> None:
    documents = [f"{number:04} " * 400 for number in range(40)]  # of 2,000 bytes: 62 sequences each
    manifest = run_with(inner__sequences=16)
    data = open_data(manifest, plan(tmp_path, corpora.as_jsonl(tmp_path / "a.jsonl", documents)), None)
    line = data.batches("run", "peer", manifest, Position(data.identity))
    for (inputs, _), _ in islice(line, 20):
        numbers = {bytes(row.tolist()).decode().split()[1] for row in inputs}
        assert len(numbers) > 8


def test_shuffling_loses_nothing_and_goes_on_from_any_position() -> None:
    documents, most = DOCUMENTS[:15], 37

    def shuffled_from(position: Position) -> Iterator[tuple[list[int], Position]]:
        line = line_from(replace(position, drawn=0), documents=documents)
        return ((ids.tolist(), after) for ids, after in shuffled(line, position, ("run", "peer"), most))

    whole = list(islice(shuffled_from(Position("c")), 1_000))
    assert whole[-1][1].epoch >= 2
    plain = [ids.tolist() for ids, _ in islice(line_from(Position("c"), documents=documents), 1_000)]
    assert [ids for ids, _ in whole[:most]] != plain[:most]
    epoch = next(number for number, (_, after) in enumerate(whole) if after.epoch) + 1
    assert epoch % most  # the last block of an epoch is shorter
    assert sorted(ids for ids, _ in whole[:epoch]) == sorted(plain[:epoch])
    rng, parts, position = random.Random(3), list[tuple[list[int], Position]](), Position("c")
    while len(parts) < 1_000:
        part = list(islice(shuffled_from(position), rng.randint(1, 90)))
        position = part[-1][1]
        parts += part
    assert parts[:1_000] == whole


def test_no_more_than_two_windows_are_held() -> None:
    most, come = 37, 0

    def counted() -> Iterator[tuple[Ids, Position]]:
        nonlocal come
        for row in line_from(Position("c")):
            come += 1
            yield row

    held = []
    for gone, _ in enumerate(islice(shuffled(counted(), Position("c"), ("run",), most), 200)):
        held.append(come - gone)
    assert most < max(held) <= 2 * most
    manifest = run_with(data__sequence_tokens=128, data__shuffle_window=2**23)
    assert window_bytes(manifest.data) == 2 * (2**23 // 128) * 129 * 4


def test_a_position_survives_being_kept_and_nonsense_is_none() -> None:
    position = Position("corpus", 1, 2, 3, 4)
    assert Position.of(position.facts()) == position
    for nonsense in (None, 3, {}, {**position.facts(), "token": -1}, {**position.facts(), "epoch": "1"}):
        assert Position.of(nonsense) is None


def test_what_validates_ends_with_the_documents() -> None:
    rows = list(packed_once(iter(["abc", "defg"]), ByteTokenizer(), 4))
    assert [row.tolist() for row in rows] == [[*b"abc\0d"], [*b"defg\0"]]


def test_text_of_a_tokenizer_comes_back_from_the_packed_tokens(tmp_path: Path) -> None:
    manifest = run_with(bpe())
    tokenizer = load_tokenizer(bpe(), manifest)
    data = open_data(manifest, plan(tmp_path, corpora.as_jsonl(tmp_path / "a.jsonl", DOCUMENTS)), bpe())
    tokens: list[int] = []
    inputs, labels = next(data.batches("run", "peer", manifest, Position(data.identity)))[0]
    assert inputs[:, 1:].equal(labels[:, :-1])
    trained = stored_documents((str(tmp_path / "a.jsonl"),), "text", 16_384, Split(0.05), tmp_path / "cache")
    ordered = list(trained.training(("run", "peer"), 0, 0))
    for ids, position in sequences(
        lambda epoch, first: iter(ordered), tokenizer, 32, Position("c"), TokenisingTally()
    ):
        tokens += ids[:-1].tolist()
        if position.epoch == 1:
            break
    ends = [place for place, token in enumerate(tokens) if token == tokenizer.end_of_text]
    texts = [text_of(tokens[a + 1 : b], bpe()) for a, b in zip([-1, *ends], ends, strict=False)]
    assert texts == ordered


def test_a_few_sequences_to_validate_on_are_spread_over_many_documents(tmp_path: Path) -> None:
    data = open_data(
        run_with(data__held_out=0.4),
        plan(tmp_path, corpora.as_jsonl(tmp_path / "a.jsonl", corpora.made_up(100))),
        None,
    )
    everything = torch.cat([inputs for inputs, _ in data.validation_batches(32, 4)]).tolist()
    some = torch.cat([inputs for inputs, _ in data.validation_batches(32, 4, 10)]).tolist()
    assert [everything.index(row) for row in some] == list(range(0, 80, 8))
    most = len(everything) - 3
    assert sum(len(inputs) for inputs, _ in data.validation_batches(32, 4, most)) == most
