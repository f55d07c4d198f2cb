"""Wrong data, one line each that says what to do."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from node.data.opening import DataPlan, open_data
from protocol.errors import DataError
from protocol.files.installation import extra_line
from tests.swarm.micro import micro_manifest
from tests.unit.corpora import as_jsonl, as_parquet, as_saved_to_disk, zstd

MANIFEST = micro_manifest(data__source="local")
LINE = json.dumps({"text": "a fine line"})


def refusal(*entries: str, field: str = "text", cache: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_data(MANIFEST, DataPlan(entries, field, cache), None).require(32)
    said = str(caught.value)
    assert "\n" not in said, said
    assert len(said) < 500
    return said


def make(directory: Path) -> None:
    """Every wrong thing, by the name that a test case uses."""
    (directory / "empty.txt").touch()
    (directory / "binary.txt").write_bytes(b"\x7fELF\0\0")
    (directory / "latin.txt").write_bytes("größer".encode("latin-1"))
    (directory / "cut-off.txt").write_bytes("größ".encode()[:-1])
    (directory / "short.txt").write_text("short")
    (directory / "blank.txt").write_text(" \n \n")
    (directory / "broken.jsonl").write_text(f"{LINE}\n\n{LINE[:-4]}\n")
    (directory / "list.jsonl").write_text(f"{LINE}\n[1, 2]\n")
    (directory / "number.jsonl").write_text('{"text": 3}\n')
    (directory / "text.jsonl").write_text("Once upon a time\n")
    (directory / "cut.jsonl.gz").write_bytes(gzip.compress(f"{LINE}\n".encode() * 100)[:-20])
    (directory / "plain.jsonl.gz").write_text(f"{LINE}\n")
    (directory / "none.parquet").write_text("PAR1 is how they begin")
    as_jsonl(directory / "body.jsonl", ["a"], "body")
    as_parquet(directory / "body.parquet", ["a"], "body")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), directory / "numbers.parquet")
    (directory / "texts").mkdir()
    (directory / "texts" / "a.md").write_text("text")
    (directory / "cut.jsonl.zst").write_bytes(zstd(f"{LINE}\n".encode() * 100)[:-4])
    (directory / "junk.jsonl.zst").write_bytes(zstd(f"{LINE}\n".encode()) + b"junk")
    (directory / "body.parquet.gz").write_bytes(gzip.compress((directory / "body.parquet").read_bytes()))
    (directory / "texts.zip").write_bytes(b"PK\x03\x04 and so on")
    with tarfile.open(directory / "texts.tar.gz", "w:gz") as archive:
        archive.add(directory / "short.txt")
    (directory / "windows.txt").write_bytes("a text".encode("utf-16"))
    (directory / "windows.csv").write_bytes("text\nrow\n".encode("utf-16"))
    (directory / "cut.json").write_text(json.dumps([{"text": "a"}] * 3)[:-5])
    (directory / "unclosed.json").write_text(json.dumps([{"text": "a"}] * 3)[:-1])
    (directory / "strings.json").write_text('["one", "two"]')
    (directory / "nested.json").write_text(json.dumps({"rows": [{"text": "a"}]}, indent=1))
    (directory / "body.csv").write_text("id;body\n1;a\n")
    (directory / "none.csv").write_text("text\n")
    (directory / "open.csv").write_text('text,id\n"two\nlines",1\n"never closed,2\nmore,3\n')
    (directory / "open-at-the-end.csv").write_text('text\na\n"')
    (directory / "none.arrow").write_text("ARROW1 is how they begin")
    (directory / "deep.jsonl").write_text("[" * 100_000)
    (directory / "no-train").mkdir()
    for split in ("test", "validation"):
        as_jsonl(directory / "no-train" / f"{split}.jsonl", ["a"])
    (directory / "damaged").mkdir()
    (directory / "damaged" / "train.parquet").write_text("no parquet")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.txt", ("missing.txt", "No such file", "Check the path")),
        ("empty.txt", ("empty.txt is empty", "Name a file with text")),
        ("blank.txt", ("no text", "blank.txt", "Name files with text")),
        ("binary.txt", ("binary.txt is a program, not text", "Leave it out")),
        ("latin.txt", ("latin.txt is not UTF-8", "iconv")),
        ("cut-off.txt", ("cut-off.txt is UTF-8 text with bytes in it that are none",)),
        ("short.txt", ("too short to train on", "--data")),
        ("*.md", ("No file matches", "*.md", "Check the pattern")),
        ("texts", ("texts is a folder", "there is a.md", "for instance --data /", "/a.md.")),
        ("cut.jsonl.zst", ("cut.jsonl.zst", "Check the file")),
        ("junk.jsonl.zst", ("junk.jsonl.zst", "Check the file")),
        ("body.parquet.gz", ("body.parquet.gz is a compressed parquet file", "Decompress it")),
        ("texts.zip", ("texts.zip is a zip archive", "unzip /", "texts.zip -d /", "texts-unpacked")),
        ("texts.tar.gz", ("texts.tar.gz is a tar archive", "tar -xf /", "texts.tar.gz -C /")),
        ("windows.txt", ("windows.txt is UTF-16", "iconv -f UTF-16 -t UTF-8 /", "windows.txt > /")),
        ("windows.csv", ("windows.csv is UTF-16", "iconv")),
        ("cut.json", ("cut.json is not whole JSON", "after 2 objects", "Fetch it again")),
        ("unclosed.json", ("unclosed.json is not whole JSON", "after 3 objects")),
        ("strings.json", ("strings.json, object 1 is not a JSON object", "'text'")),
        ("nested.json", ("nested.json, object 1 has no field 'text'", "rows")),
        ("body.csv", ("body.csv has no column 'text'", "--text-field", "body")),
        ("open.csv", ("open.csv:4: a quote of this row is not closed", "Close it")),
        ("open-at-the-end.csv", ("open-at-the-end.csv:3: a quote", "Close it")),
        ("none.csv", ("no text in", "none.csv")),
        ("none.arrow", ("none.arrow is not a readable Arrow file", "leave it out")),
        ("deep.jsonl", ("deep.jsonl is not whole JSON", "correct that place")),
        ("no-train", ("no-train", "has no split 'train', but", "validation", "Name its files with --data")),
        ("broken.jsonl", ("broken.jsonl:3 is not JSON", "Correct or delete")),
        ("list.jsonl", ("list.jsonl:2 is not a JSON object",)),
        ("number.jsonl", ("number.jsonl:1", "holds int, not text", "--text-field")),
        ("text.jsonl", ("text.jsonl:1 is not JSON",)),
        ("body.jsonl", ("body.jsonl:1 has no field 'text'", "--text-field", "body")),
        ("cut.jsonl.gz", ("cut.jsonl.gz", "Check the file")),
        (
            "plain.jsonl.gz",
            ("too short to train on",),
        ),  # it was read: decompressed on its way, as some browsers do
        ("none.parquet", ("none.parquet is not a readable parquet file", "leave it out")),
        ("body.parquet", ("body.parquet has no column 'text'", "--text-field", "body")),
        ("numbers.parquet", ("numbers.parquet", "holds int, not text")),
        ("damaged", ("damaged/train.parquet is not a readable parquet file", "leave it out")),
    ],
)
def test_wrong_files(name: str, said: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path)
    found = refusal(str(tmp_path / name), cache=tmp_path / "cache")
    for words in said:
        assert words in found
    assert not list((tmp_path / "cache").glob("*.new")), "a store that is not whole was left behind"


def test_a_dataset_without_the_column(tmp_path: Path) -> None:
    place = as_saved_to_disk(tmp_path / "saved", ["a"])
    said = refusal(place, field="body", cache=tmp_path / "cache")
    assert "has no field 'body'" in said
    assert "--text-field: there is text" in said


def test_an_unknown_dataset_of_the_hub_without_a_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = refusal("hub:nobody/nothing-like-this", cache=tmp_path)
    assert "Cannot read the dataset 'nobody/nothing-like-this'" in said
    assert "the connection, or name files on this machine with --data" in said


def test_a_dataset_of_the_hub_beside_others(tmp_path: Path) -> None:
    assert "alone" in refusal("hub:a/b", str(tmp_path), cache=tmp_path)


def test_no_data_where_the_run_has_none_of_its_own(tmp_path: Path) -> None:
    assert "text of your own: name it with --data" in refusal(cache=tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").touch()
    said = refusal(str(tmp_path / "a.txt"), cache=tmp_path / "file" / "cache")
    assert "Cannot keep the documents" in said
    assert "--data-cache" in said


def test_zstd_without_its_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(f"{LINE}\n".encode()))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = refusal(str(tmp_path / "a.jsonl.zst"), cache=tmp_path / "cache")
    assert f"zstd -d {tmp_path / 'a.jsonl.zst'}" in said
    assert extra_line("data") in said
