"""Advice about text that leads to what it says: rows without a field, tables with titles, addresses, places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from bootstrap.tools_cli import app
from node.config import build_config
from node.data.documents import Split, stored_documents
from node.data.sources import documents_in, places_of
from protocol.errors import DataError, UserError
from tests.unit import corpora

ROWS = [{"text": "one", "id": 1}, {"text": "two", "id": 2}, {"body": "three", "id": 3}]
FORMS: dict[str, Callable[[list[dict[str, object]]], str]] = {
    "lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "lines with gaps": lambda rows: "\n" + "\n".join(json.dumps(row) + "\n" for row in rows),
    "an array": json.dumps,
    "spread out": lambda rows: json.dumps(rows, indent=1),
}


def texts(place: Path, field: str = "text") -> list[str]:
    return [b"".join(blocks).decode() for blocks in documents_in(places_of([str(place)]), field)]


def refusal(place: Path | str, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        list(documents_in(places_of([str(place)]), field))
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_the_field_of_others_is_not_answered_with_other_fields(
    form: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    file.write_text(FORMS[form](ROWS))
    said = refusal(file)
    assert "has no field 'text', which the rows before it have. Give it one, with null" in said
    assert "--text-field" not in said
    file.write_text(FORMS[form]([*ROWS[:2], ROWS[2] | {"text": None}]))
    assert texts(file) == ["one", "two"], "the advice, followed"
    file.write_text(FORMS[form](ROWS[2:]))
    assert "Name the one that holds the text with --text-field: there is body" in refusal(file)


def test_a_nested_field_that_some_rows_lack_is_told_in_columns_as_well(tmp_path: Path) -> None:
    rows = [{"a": [{"t": "x"}]}, {"a": []}, {"a": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", "a.t") == ["x"]


@pytest.mark.parametrize("damage", ["cut", "gone", "no table of contents"])
def test_a_damaged_dataset_on_this_disk_is_not_looked_for_on_the_hub(damage: str, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    corpora.as_saved_to_disk(place, ["one", "two"])
    arrow = next(place.glob("*.arrow"))
    if damage == "cut":
        arrow.write_bytes(arrow.read_bytes()[:200])
    elif damage == "gone":
        arrow.unlink()
    else:
        (place / "state.json").write_text("{}")
    said = refusal(place)
    assert "which save_to_disk has left, is damaged or not whole" in said
    assert "hub" not in said.lower().replace("huggingface", "")
    assert "connection" not in said


def test_splits_on_this_disk_are_named_by_their_folders(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("test", "validation")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    said = refusal(tmp_path / "saved")
    assert f"Name the folder of one: --data {tmp_path}/saved/SPLIT." in said
    assert texts(tmp_path / "saved" / "test") == ["test"], "the advice, followed"


TABLE = "id,text\n1,one\n2,two\n"


@pytest.mark.parametrize("above", ["\n", "\n\n\n", "\r\n", "  \n", "sep=,\n", "sep=,\n\n", "\ufeff\n"])
def test_empty_lines_above_a_table_are_none_of_it(above: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(above + TABLE, newline="")
    assert texts(tmp_path / "a.csv") == ["one", "two"]


@pytest.mark.parametrize(
    "above", ["Report of 2026\n", "A title\n\n", "# made by us\n# today\n\n", "a,b,c\n\n"]
)
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_titles_above_a_table_are_told_with_their_place(above: str, mark: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(above + TABLE.replace(",", mark))
    line = above.count("\n") + 1
    assert (
        f"names its columns in line {line}, not in its first row. Delete the lines above that one."
        in refusal(file)
    )
    file.write_text("".join(file.read_text().splitlines(keepends=True)[line - 1 :]))
    assert texts(file) == ["one", "two"], "the advice, followed"


def test_a_row_is_named_by_its_line_whatever_is_above_the_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n\nid,text\n1,one\n2,two,more\n")
    assert f"{tmp_path}/a.csv:5: this row has 3 fields" in refusal(tmp_path / "a.csv")


ADDRESSES = {
    "https://example.org/a.jsonl": "Download it, and name the file.",
    "HTTP://example.org/a.jsonl": "Download it, and name the file.",
    "ftp://example.org/a": "Download it, and name the file.",
    "s3://bucket/a.parquet": "Download it, and name the file.",
    "gs://bucket/*.parquet": "Download it, and name the file.",
    "file:///data/a%20b.txt": "Name the file by its path, as '/data/a%20b.txt'.",
    "file:/data/a.txt": "Name the file by its path, as /data/a.txt.",
    "https://huggingface.co/datasets/roneneldan/TinyStories": "write hub:roneneldan/TinyStories.",
    "https://hf.co/datasets/a/b/tree/main": "write hub:a/b.",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_told_as_one(address: str) -> None:
    said = refusal(address)
    assert said.startswith(f"{address} is an address")
    assert said.replace("/data/a%20b.txt.", "'/data/a%20b.txt'.").endswith(ADDRESSES[address])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["found", "--from-checkpoint", "https://huggingface.co/Qwen/Qwen3-0.6B"],
            "write Qwen/Qwen3-0.6B (a tok",
        ),
        (["found", "--tokenizer", "https://example.org/tokenizer.json"], "Download it, and name the file."),
        (["found", "--manifest", "https://example.org/run.toml"], "Download it, and name the file."),
        (["generate", "a", "--model", "https://huggingface.co/Qwen/Qwen3-0.6B"], "write Qwen/Qwen3-0.6B"),
        (["eval", "--model", "s3://bucket/model"], "Download it, and name the file."),
        (["tokenizer", "https://example.org/a.txt"], "Download it, and name the file."),
    ],
)
def test_an_address_is_told_as_one_at_every_option(words: list[str], wanted: str) -> None:
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 2, answer.output
    assert "is an address" in answer.output
    assert wanted in " ".join(answer.output.split())


def test_a_name_with_a_colon_is_no_address(tmp_path: Path) -> None:
    (tmp_path / "a:b.txt").write_text("text")
    assert texts(tmp_path / "a:b.txt") == ["text"]


@pytest.mark.parametrize("below", ["", "cache"])
def test_a_file_where_the_documents_are_to_be_kept_is_told(below: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError) as caught:
        stored_documents([str(tmp_path / "a.txt")], "text", 4_096, Split(0.0), tmp_path / "file" / below)
    said = str(caught.value)
    assert "permissions" not in said
    assert "A file is where a folder is due: move it away, or choose another --data-cache." in said


@pytest.mark.parametrize("cap", ["50%", " 50 %", "100%"])
def test_a_share_of_nothing_is_no_cap(cap: str) -> None:
    with pytest.raises(UserError, match="is a share, and there is nothing to take it of: write it as 500GB"):
        build_config({"monthly_cap": cap}, {})
    assert build_config({"monthly_cap": "500GB"}, {}).monthly_cap == "500GB"
