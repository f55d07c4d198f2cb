"""A dataset that is read as a stream: nothing on disk, nothing counted, and still each document once in an epoch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from node.data.batches import Position
from node.data.documents import Split, StreamedDocuments
from node.data.opening import DataPlan, open_data
from node.data.sources import HubStream
from protocol.errors import DataError
from tests.swarm.micro import micro_manifest
from tests.unit.corpora import as_hub_layout, made_up

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
    assert list(HubStream(f"{place}::test", "text").texts()) == ["not to be trained on"]
    with pytest.raises(DataError, match=r"Cannot read the dataset .*hub:NAME:CONFIG:SPLIT"):
        HubStream(f"{place}::validation", "text")
    with pytest.raises(DataError, match=r"no column 'body'.*there is id, text"):
        list(HubStream(place, "body").texts())
