"""What is read and yet doubted: rows of another encoding, markup, and files that the names of splits leave out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from node.data.sources import documents_in, places_of
from protocol.errors import DataError
from tests.unit.corpora import as_jsonl

GERMAN = [f"Größe {number}, schön für Bücher" for number in range(40)]
ENGLISH = [f"plain words {number}" for number in range(400)]


def texts(*entries: object) -> list[str]:
    return [b"".join(blocks).decode() for blocks in documents_in(places_of(list(map(str, entries))), "text")]


# --- rows of another encoding -------------------------------------------------------------------


def lines(rows: list[str], encoding: str) -> bytes:
    return "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows).encode(encoding)


def table(rows: list[str], encoding: str) -> bytes:
    return ("id;text\n" + "".join(f"{number};{row}\n" for number, row in enumerate(rows))).encode(encoding)


FORMS = {"rows.jsonl": lines, "rows.csv": table}


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "mac-roman", "cp850"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "rows", [GERMAN, GERMAN + ENGLISH, GERMAN[:1]], ids=["all", "one in eleven", "one row"]
)
def test_rows_in_another_encoding_are_refused_as_a_text_is(
    rows: list[str], name: str, encoding: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(FORMS[name](rows, encoding))
    with pytest.raises(
        DataError, match=r"is in another encoding than UTF-8, as .* rows show\. Convert it .*LATIN1"
    ):
        texts(file)
    file.write_bytes(file.read_bytes().decode(encoding).encode())
    assert texts(file) == rows, "the advice, followed"


@pytest.mark.parametrize("name", FORMS)
def test_a_large_file_in_another_encoding_is_not_read_to_its_end(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMS[name](GERMAN * 50, "latin-1"))
    with pytest.raises(DataError, match="as 1,000 of its first 1,000 rows show"):
        texts(tmp_path / name)


def test_columns_in_another_encoding_are_refused_without_a_command_that_cannot_help(tmp_path: Path) -> None:
    raw = pa.array([row.encode("latin-1") for row in GERMAN], pa.binary())
    written = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"text": written}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"as 40 of its first 40 rows show\. Write it again with its text as UTF-8\.$"
    ):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize("damaged", [1, 20])
def test_a_few_damaged_rows_are_mended_as_before(
    damaged: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*GERMAN, *ENGLISH]
    raw = lines(rows, "utf-8").splitlines(keepends=True)
    for number in range(damaged):
        raw[-number - 1] = raw[-number - 1].replace(b"words", b"w\xf6rds")
    (tmp_path / "a.jsonl").write_bytes(b"".join(raw))
    assert sum("w\ufffdrds" in text for text in texts(tmp_path / "a.jsonl")) == damaged
    assert f"Rows that are not UTF-8: {damaged}; the first is" in caplog.text


def test_halves_of_characters_are_no_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d"}\n' * 9)
    assert texts(tmp_path / "a.jsonl") == ["half \ufffd"] * 9


# --- markup -------------------------------------------------------------------------------------

MARKUP = {
    "a web page (HTML)": [
        "<!DOCTYPE html>\n<html><body>a</body></html>",
        "\n <HTML>",
        "<!-- made by -->\n<html>",
    ],
    "XML": [
        '<?xml version="1.0"?>\n<TEI/>',
        "\ufeff<?xml version='1.0'?>",
        "<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
}


@pytest.mark.parametrize("what", MARKUP)
def test_markup_is_text_with_one_line_for_all(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, text in enumerate(MARKUP[what]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "plain.txt").write_text("<p>a line of its own is no page")
    assert len(texts(tmp_path / "*.txt")) == len(MARKUP[what]) + 1
    [told] = caplog.messages
    assert told.startswith(
        f"Texts that are trained on with their markup: {len(MARKUP[what])}; {tmp_path}/0.txt is {what}."
    )


@pytest.mark.parametrize("what", MARKUP)
def test_what_a_server_sends_in_place_of_rows_is_refused(what: str, tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        (tmp_path / name).write_text(MARKUP[what][0])
        with pytest.raises(DataError, match="as servers send in place of a file"):
            texts(tmp_path / name)


# --- splits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("essays.jsonl", "my-test-results.jsonl"), ["my-test-results.jsonl"]),
        (("train.jsonl", "notes.jsonl"), ["train.jsonl"]),
        (("train.jsonl", "test.jsonl", "validation.jsonl"), ["train.jsonl"]),
        (("a/train.jsonl", "b/other.jsonl"), ["a/train.jsonl"]),
        (("dev.jsonl", "letters.jsonl"), ["dev.jsonl"]),
    ],
)
def test_files_that_the_names_of_splits_leave_out_are_named(
    names: tuple[str, ...], read: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "my texts"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        as_jsonl(folder / name, [name])
    assert texts(folder) == read
    [told] = [line for line in caplog.messages if "left out" in line]
    left_out = sorted(set(names) - set(read))
    assert (
        f"{len(read)} files are read, as {read[0]}, and {len(left_out)} are left out, as {', '.join(left_out)}."
        in told
    )
    _, pattern = shlex.split(told.partition("name all of them: ")[2].removesuffix("."))
    caplog.clear()
    assert texts(pattern) == sorted(names), "the advice, followed"
    assert not caplog.messages


def test_a_dataset_of_one_split_leaves_nothing_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    as_jsonl(tmp_path / "train-0.jsonl", ["a"])
    as_jsonl(tmp_path / "train-1.jsonl", ["b"])
    assert texts(tmp_path) == ["a", "b"]
    assert not caplog.messages


def test_rows_in_two_formats_of_which_one_is_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "README.md").write_text("# A dataset\n")
    for number in range(3):
        as_jsonl(tmp_path / f"{number}.jsonl", [str(number)])
    (tmp_path / "more.csv").write_text("id,text\n1,a row\n")
    assert texts(tmp_path) == ["0", "1", "2"]
    [told] = [line for line in caplog.messages if "left out" in line]
    assert "3 files are read, as 0.jsonl, 1.jsonl, 2.jsonl, and 1 are left out, as more.csv." in told
    given = shlex.split(told.partition("name all of them: ")[2].removesuffix("."))
    assert texts(*given[1::2]) == ["a row", "0", "1", "2"]


def test_compressed_texts_beside_rows_are_named_with_their_endings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import gzip

    as_jsonl(tmp_path / "b.jsonl", ["a row"])
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert texts(tmp_path) == ["a row"]
    [told] = caplog.messages
    given = shlex.split(told.partition("name them, too: ")[2].removesuffix("."))
    assert sorted(texts(tmp_path, *given[1::2])) == ["a row", "packed", "plain"]
