"""Text as people brought it in a hunt: what was wrong in silence, or told with advice that led elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from bootstrap.tools_cli import app
from node.data.documents import Split, stored_documents
from node.data.sources import documents_in, places_of
from protocol.errors import DataError


def texts(place: Path, field: str = "text") -> list[str]:
    return [b"".join(document).decode() for document in documents_in(places_of([str(place)]), field)]


def refusal(place: Path, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        texts(place, field)
    return str(caught.value)


@pytest.mark.parametrize("entry", ["", "  "])
def test_a_variable_that_is_not_set_is_not_this_folder(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private.jsonl").write_text('{"text": "mine"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="An empty name was given"):
        places_of([entry])


def test_text_that_changed_within_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for said in ("aaaa", "bbbb"):
        file.write_text(said * 100)
        os.utime(file, (1, 1))
        stored = stored_documents([str(file)], "text", 16_384, Split(0.0), tmp_path / "cache")
        assert list(stored.training((), 0, 0)) == [said * 100]


def test_a_stores_place_within_the_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    named, cache = [str(tmp_path / "**" / "*")], tmp_path / "cache"
    stored_documents(named, "text", 16_384, Split(0.0), cache)
    with pytest.raises(DataError, match="lie in what --data names"):
        stored_documents(named, "text", 16_384, Split(0.0), cache)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_the_columns_of_a_table_are_named_whatever_is_between_them(mark: str, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text(f'"Nachricht"{mark}"Datum"\n"ja"{mark}"1"\n')
    assert "there is Nachricht, Datum." in refusal(file)
    assert texts(file, "Nachricht") == ["ja"]


def test_a_damaged_byte_does_not_make_the_rest_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "mixed.txt"
    file.write_bytes("Über Käse. ".encode() * 50 + b"\xfc")
    said = refusal(file)
    assert "with bytes in it that are none" in said
    assert "iconv -c -f UTF-8 -t UTF-8" in said


def test_a_message_with_a_picture_keeps_its_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "x"}}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]}
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(row))
    assert texts(file, "messages") == ["user: what is this\nassistant: a cat"]


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "twice.parquet")
    assert "has the column 'text' twice" in refusal(tmp_path / "twice.parquet")


def test_a_date_beyond_pythons_beside_the_text_is_told(tmp_path: Path) -> None:
    when = pa.array([2**62], pa.timestamp("us"))
    row = pa.StructArray.from_arrays([pa.array(["a"]), when], names=["text", "when"])
    pq.write_table(pa.table({"row": row}), tmp_path / "far.parquet")
    assert "or what is beside it, cannot be read" in refusal(tmp_path / "far.parquet", "row.text")


def test_a_tokenizer_is_not_written_over_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 1_000)
    for texts_named in ("a.txt", "*.txt"):
        answer = CliRunner().invoke(
            app,
            [
                "tokenizer",
                str(tmp_path / texts_named),
                "--out",
                str(tmp_path / "a.txt"),
                "--force",
                "--vocab",
                "300",
            ],
        )
        assert answer.exit_code == 2
        assert "is one of the texts" in answer.output.replace("\n", " ")
    assert (tmp_path / "a.txt").read_text() == "text " * 1_000
