"""A dataset that is read as a stream: nothing on disk, nothing counted, and still each document once in an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import datasets
import pytest

from node.data.batches import TOKENISED_AT_ONCE, TokenisingTally, TrainingData
from node.data.documents import Split, StreamedDocuments
from node.data.hub import HubStream
from node.data.opening import DataPlan, open_data
from node.data.tokenizer import ByteTokenizer
from node.storage.position import Position
from protocol.errors import DataError
from tests.swarm.micro import micro_manifest
from tests.unit.corpora import as_hub_layout, as_jsonl, made_up

DOCUMENTS = made_up(40)


def streamed(tmp_path: Path, buffer: int = 8) -> StreamedDocuments:
    place = tmp_path / "dataset"
    if not place.exists():
        as_hub_layout(place, [*DOCUMENTS, ""])
    return StreamedDocuments(HubStream(str(place), "text"), 16_384, Split(0.3), buffer)


@pytest.mark.long
def test_an_epoch_has_every_document_once_in_a_peers_own_order(tmp_path: Path) -> None:
    documents = streamed(tmp_path)
    held_out = list(documents.held_out())
    orders = [list(documents.training(("run", peer), epoch, 0)) for peer in "ab" for epoch in (0, 1)]
    for order in orders:
        assert sorted(order + held_out) == sorted(DOCUMENTS)
        assert order != [text for text in DOCUMENTS if text not in held_out]
    assert len({tuple(order) for order in orders}) == 4
    assert list(documents.held_out()) == held_out


@pytest.mark.long
def test_going_on_passes_over_what_was_read(tmp_path: Path) -> None:
    whole = list(streamed(tmp_path).training(("run", "a"), 1, 0))
    assert list(streamed(tmp_path).training(("run", "a"), 1, 11)) == whole[11:]


@pytest.mark.long
def test_training_on_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    streamed(tmp_path)
    manifest = micro_manifest(data__source="local")
    plan = DataPlan((f"hub:{tmp_path / 'dataset'}",), "text", tmp_path / "cache")

    def drawn(position: Position, count: int) -> list[tuple[object, Position]]:
        data = open_data(manifest, plan, None)
        line = data.batches("run", "peer", manifest, position)
        return [(inputs.tolist(), after) for (inputs, _), after in islice(line, count)]

    start = Position(open_data(manifest, plan, None).identity)
    whole = drawn(start, 300)
    assert whole[-1][1].epoch >= 1
    for stop in (57, 250):
        assert drawn(whole[stop - 1][1], 20) == whole[stop : stop + 20]
    assert not (tmp_path / "cache").exists()


def test_splits_and_configurations_are_named_behind_the_dataset(tmp_path: Path) -> None:
    streamed(tmp_path)
    place = str(tmp_path / "dataset")
    for name in (f"{place}::test", f"{place}:default:test"):
        assert list(HubStream(name, "text").texts()) == ["not to be trained on"]
    assert len(list(HubStream(f"{place}:default", "text").texts())) == len(DOCUMENTS) + 1
    with pytest.raises(DataError, match=r"Cannot read the dataset .*hub:NAME:CONFIG:SPLIT"):
        HubStream(f"{place}:other", "text")
    with pytest.raises(DataError, match=r"Cannot read the dataset .*hub:NAME:CONFIG:SPLIT"):
        HubStream(f"{place}::validation", "text")
    with pytest.raises(DataError, match=r"no field 'body'.*there is text"):
        list(HubStream(place, "body").texts())


# --- without the library: what is made of its examples -------------------------------------------


class Texts(HubStream):
    """So many texts in their order. Mutable: with what it was asked."""

    def __init__(self, count: int) -> None:
        self.name = "made up"
        self.asked: list[tuple[int | None, int]] = []
        self._count = count

    def texts(self, seed: int | None = None, buffer: int = 0) -> Iterator[str | None]:
        self.asked.append((seed, buffer))
        return (f"text {number} and more of it" for number in range(self._count))


def test_ten_thousand_examples_are_shuffled_among_each_other() -> None:
    stream = Texts(3)
    documents = StreamedDocuments(stream, 16_384, Split(0.0))
    for seed in (("run", "a"), ("run", "b"), ("run", "a")):
        assert len(list(documents.training(seed, 0, 0))) == 3
    (first, buffer), (other, _), (again, _) = stream.asked
    assert first == again != other
    assert buffer == 10_000


def test_the_files_of_a_dataset_come_in_any_order(tmp_path: Path) -> None:
    for file in range(3):
        as_jsonl(tmp_path / f"train-{file}.jsonl", [f"{file}: {number}" for number in range(5)])
    stream = HubStream(str(tmp_path), "text")
    orders = {tuple(filter(None, stream.texts(seed, 1))) for seed in range(8)}
    assert len({order[0] for order in orders}) > 1
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(stream.texts()))}  # type: ignore[type-var]


def test_what_came_before_a_position_is_read_and_not_tokenised() -> None:
    data = TrainingData(StreamedDocuments(Texts(400), 16_384, Split(0.0)), ByteTokenizer())
    manifest, tally = micro_manifest(data__source="local", data__shuffle_window=1), TokenisingTally()
    line = data.batches("run", "peer", manifest, Position(data.identity, 0, 350), tally)
    (inputs, _), after = next(line)
    assert b"text 350 and more" in bytes(inputs.flatten().tolist())
    assert after.document >= 350
    assert tally.documents <= 2 * TOKENISED_AT_ONCE


def test_a_connection_that_breaks_for_good_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Breaks:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": "one"}
            raise ConnectionError("the other end\nis gone")

        def shuffle(self, *, seed: int, buffer_size: int) -> Breaks:
            return self

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": Breaks()})
    data = open_data(
        micro_manifest(data__source="local"), DataPlan(("hub:some/name",), "text", tmp_path), None
    )
    with pytest.raises(DataError, match=r"'some/name' broke off .* \(the other end is gone\)\. Check"):
        data.require(32)
