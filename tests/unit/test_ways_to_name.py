"""What is read is read in the same way however it is named: by itself, a glob or its folder; plain or compressed."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config import NodeConfig
from node.data.documents import Split, stored_documents
from node.data.hub import HubStream
from node.data.rows import json_texts, mended
from node.data.sources import DEFAULT_FIELD, documents_in, places_of
from protocol.errors import DataError
from tests.unit.corpora import made_up, zstd

TEXTS = [*made_up(30), 'two\nlines, a comma and a "quote"', "\ttabs; semicolons | and bars\t"]
WAYS: list[tuple[str, Callable[[bytes], bytes]]] = [
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".xz", lzma.compress),
    (".zst", zstd),
]


def objects(texts: Sequence[str]) -> list[dict[str, object]]:
    return [{"id": number, "text": text, "more": None} for number, text in enumerate(texts)]


def as_csv(texts: Sequence[str], mark: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["id", "text", "more"], delimiter=mark)
    writer.writeheader()
    writer.writerows(objects(texts))
    return out.getvalue().encode()


def as_lines(texts: Sequence[str], end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in objects(texts)).encode()


def as_array(texts: Sequence[str]) -> bytes:
    return json.dumps(objects(texts), ensure_ascii=False).encode()


def spread_out(texts: Sequence[str]) -> bytes:
    return json.dumps(objects(texts), indent=1).encode()


def one_after_another(texts: Sequence[str]) -> bytes:
    return "\n".join(json.dumps(row, indent=1) for row in objects(texts)).encode()


def as_parquet(texts: Sequence[str]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), sink)
    return sink.getvalue().to_pybytes()


def as_arrow(texts: Sequence[str], *, stream: bool = False) -> bytes:
    sink, table = (
        pyarrow.BufferOutputStream(),
        pyarrow.table({"id": list(range(len(texts))), "text": list(texts)}),
    )
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


FORMS: dict[str, tuple[str, Callable[[Sequence[str]], bytes]]] = {
    "lines": ("a.jsonl", as_lines),
    "ndjson": ("a.NDJSON", as_lines),
    "lines as .json": ("a.json", as_lines),
    "Windows' lines": ("a.jsonl", lambda texts: as_lines(texts, "\r\n")),
    "marked lines": ("a.jsonl", lambda texts: "\ufeff".encode() + as_lines(texts)),
    "array": ("a.json", as_array),
    "array as lines": ("a.jsonl", as_array),
    "marked array": ("a.json", lambda texts: "\ufeff".encode() + as_array(texts)),
    "spread out": ("a.json", spread_out),
    "one after another": ("a.json", one_after_another),
    "csv": ("a.csv", as_csv),
    "marked csv": ("a.csv", lambda texts: "\ufeff".encode() + as_csv(texts)),
    "csv with ;": ("a.csv", lambda texts: as_csv(texts, ";")),
    "csv with |": ("a.csv", lambda texts: as_csv(texts, "|")),
    "tsv": ("a.tsv", lambda texts: as_csv(texts, "\t")),
    "tsv with ,": ("a.tsv", as_csv),
    "parquet": ("a.parquet", as_parquet),
    "arrow file": ("a.arrow", as_arrow),
    "arrow stream": ("a.arrow", lambda texts: as_arrow(texts, stream=True)),
}  # fmt: skip
COLUMNS = ("parquet", "arrow file", "arrow stream")


def read(*entries: str | Path, field: str = "text") -> list[str]:
    return [b"".join(blocks).decode() for blocks in documents_in(places_of(list(map(str, entries))), field)]


def named(file: Path) -> list[str]:
    """By itself, by a glob, by its folder, by two of these at once."""
    folder = str(file.parent)
    return [str(file), f"{folder}/*", f"{folder}/[a]*", f"{folder}/../{file.parent.name}/{file.name}", folder]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_in_every_form_by_every_name(form: str, tmp_path: Path) -> None:
    name, make = FORMS[form]
    raw = make(TEXTS)
    kinds = [("", raw)] if form in COLUMNS else [("", raw), *((end, how(raw)) for end, how in WAYS)]
    for number, (ending, contents) in enumerate(kinds):
        (folder := tmp_path / str(number)).mkdir()
        (folder / (name + ending)).write_bytes(contents)
        for entry in named(folder / (name + ending)):
            assert read(entry) == TEXTS, entry
        assert read(*named(folder / (name + ending))[:-1]) == TEXTS, "one file by four names is one file"


@pytest.mark.parametrize("form", ["lines", "parquet", "arrow file", "array"])
def test_contents_say_what_a_file_is_when_its_name_does_not(form: str, tmp_path: Path) -> None:
    raw = FORMS[form][1](TEXTS)
    for name in ("part-00000", "a.txt", "a.data"):
        (tmp_path / name).write_bytes(raw)
        assert read(tmp_path / name) == TEXTS
    if form not in COLUMNS:
        for number, (_, compress) in enumerate([("", bytes), *WAYS]):
            (tmp_path / f"{number}.jsonl.gz").write_bytes(compress(raw))  # whatever its ending promises
            assert read(tmp_path / f"{number}.jsonl.gz") == TEXTS


@pytest.mark.parametrize(("ending", "compress"), [("", bytes), *WAYS])
def test_a_text_file_is_one_document_in_every_way(
    ending: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    text = 'A text.\n{"not": "rows"}\n' + "größer\n" * 200_000
    for mark in ("", "\ufeff"):
        (folder := tmp_path / f"texts{len(mark)}").mkdir()
        file = folder / f"a.txt{ending}"
        file.write_bytes(compress((mark + text).encode()))
        (folder / ".hidden.txt").write_text("an editor's copy")
        (folder / "empty.txt").touch()
        for entry in (file, folder, folder / "a*", folder / "**" / "*.txt*"):
            assert read(entry) == [text]


@pytest.mark.parametrize(
    "text", ['{"no": "such field"}\nand so on', "[1] is a footnote", '{"text": cut off', "[{", "{}"]
)
def test_text_that_looks_a_little_like_json_is_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt") == [text]


def test_a_folder_is_all_its_rows_but_for_splits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(["one"]))
    (tmp_path / "notes.txt").write_text("no row")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(as_csv(["two"])))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.parquet").write_bytes(as_parquet(["three"]))
    assert read(tmp_path) == ["one", "two", "three"]
    for split in ("train", "test"):
        (tmp_path / "hub" / split).mkdir(parents=True)
        (tmp_path / "hub" / split / "0.jsonl.zst").write_bytes(zstd(as_lines([split])))
    assert read(tmp_path / "hub") == ["train"]


@given(
    st.lists(st.text(max_size=40), max_size=20),
    st.sampled_from(["lines", "array", "spread out", "csv", "parquet"]),
)
def test_any_text_comes_back_from_every_form(texts: list[str], form: str) -> None:
    texts = [text.replace("\0", "").removeprefix("\ufeff") for text in texts]
    name, make = FORMS[form]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(make(texts) or b" ")
        assert read(Path(folder) / name) == [text for text in texts if text]


def test_a_row_longer_than_a_block_and_an_array_of_many_blocks(tmp_path: Path) -> None:
    texts = ["x" * 3_000_000, *(f"{number} " * 1000 for number in range(400)), "ü" * 2_000_000]
    for name in ("lines", "array", "spread out", "csv"):
        file, make = FORMS[name]
        (tmp_path / file).write_bytes(make(texts))
        assert read(tmp_path / file) == texts


# --- damage -------------------------------------------------------------------------------------

BAD = b"caf\xe9 \xe4\xb8 and \xff"


def bad_parquet(rows: Sequence[bytes]) -> bytes:
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    offsets = pyarrow.py_buffer(b"".join(end.to_bytes(4, "little") for end in ends))
    parts = [None, offsets, pyarrow.py_buffer(b"".join(rows))]
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), len(rows), parts)}), sink
    )
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.parquet", bad_parquet),
        ("a.jsonl", lambda rows: b"".join(b'{"text": "' + row + b'"}\n' for row in rows)),
        ("a.json", lambda rows: b"[" + b",".join(b'{"text": "' + row + b'"}' for row in rows) + b"]"),
        ("a.csv", lambda rows: b"text\n" + b"".join(row + b"\n" for row in rows)),
    ],
)  # fmt: skip
def test_rows_that_are_not_utf8_are_mended_counted_and_told_once(
    name: str, make: Callable[[Sequence[bytes]], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).write_bytes(make([b"good"] * 300 + [BAD] + [b"fine"] * 300 + [BAD]))
    expected = (
        ["good"] * 300 + [BAD.decode(errors="replace")] + ["fine"] * 300 + [BAD.decode(errors="replace")]
    ) * 2
    for entry in (tmp_path, tmp_path / "*" / "*"):
        caplog.clear()
        assert read(entry) == expected
        (said,) = caplog.messages
        assert "4; the first is" in said
        assert f"{name}, row 301" in said


@given(st.binary(max_size=12), st.text(max_size=3))
def test_mending_is_what_replacing_does(raw: bytes, text: str) -> None:
    assert mended(raw.decode("utf-8", errors="surrogateescape")) == raw.decode("utf-8", errors="replace")
    assert mended(text) == text
    assert mended(text + "\ud83d!") == text + "\ufffd!"  # half a character, as JSON can spell it


@pytest.mark.parametrize(
    ("tail", "told"),
    [(b"", False), (bytes(512), False), (b"\0\0\0junk", True), (b"j", True), (b"\x1f", True)],
)
def test_a_gzip_ends_where_gunzip_says(
    tail: bytes, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = gzip.compress(as_lines(TEXTS[:10])) + bytes(3) + gzip.compress(as_lines(TEXTS[10:]))
    (tmp_path / "a.jsonl.gz").write_bytes(members + tail)
    assert read(tmp_path / "a.jsonl.gz") == TEXTS
    assert ["after the end of its gzip" in said for said in caplog.messages] == [True] * told


def test_a_file_cut_short_anywhere_is_one_sentence(tmp_path: Path) -> None:
    lines = as_lines(["one", "zwölf"])
    forms = {f"a.jsonl{ending}": compress(lines) for ending, compress in WAYS} | {
        "a.json": as_array(["one", "zwölf"])
    }
    shortest = {"a.jsonl.bz2": 3, "a.jsonl.xz": 6, "a.jsonl.zst": 4}  # by which they are known
    for name, whole in forms.items():
        for end in range(shortest.get(name, 2), len(whole)):
            (tmp_path / name).write_bytes(whole[:end])
            with pytest.raises(DataError, match=r"Check the file|Fetch it again"):
                read(tmp_path / name)


def test_a_mark_or_a_form_does_not_change_what_a_corpus_is(tmp_path: Path) -> None:
    """Its identity is what positions in checkpoints and the held-out part hang on."""
    (tmp_path / "a.txt").write_text("A text.\n" * 50)
    (tmp_path / "b.txt").write_text("\ufeff" + "A text.\n" * 50)
    (tmp_path / "c.csv").write_bytes(as_csv(["A text.\n" * 50]))
    (tmp_path / "d.json").write_bytes(as_array(["\ufeff" + "A text.\n" * 50]))
    identities = {
        stored_documents([str(tmp_path / name)], "text", 16_384, Split(0.05), tmp_path / "cache").identity
        for name in ("a.txt", "b.txt", "c.csv", "d.json")
    }
    assert len(identities) == 1


def test_json_is_not_read_whole_into_memory(tmp_path: Path) -> None:
    """The first of a long array comes before its end was looked at: a damaged end does not hide it."""
    (tmp_path / "a.json").write_bytes(as_array(["x" * 1000] * 4000)[:-50])
    assert next(json_texts(tmp_path / "a.json", "text")) == "x" * 1000


def test_nothing_is_logged_of_what_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "a.jsonl").write_bytes(as_lines(TEXTS))
    read(tmp_path)
    assert not caplog.messages


# --- what docs/data.md says of folders, fields and streams ---------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow"])
def test_the_text_is_in_the_field_that_is_named(name: str, tmp_path: Path) -> None:
    rows = [{"text": "another", "body": f"text {number}"} for number in range(3)]
    table = pyarrow.table({key: [row[key] for row in rows] for key in ("text", "body")})
    if name.endswith((".jsonl", ".json")):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, tmp_path / name)
    elif name.endswith(".arrow"):
        with pyarrow.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    else:
        (tmp_path / name).write_text("text,body\n" + "".join(f"another,{row['body']}\n" for row in rows))
    assert read(tmp_path / name, field="body") == [row["body"] for row in rows]
    assert read(tmp_path / name, field=DEFAULT_FIELD) == ["another"] * 3
    assert DEFAULT_FIELD == NodeConfig().text_field == "text"


def test_what_is_hidden_in_a_folder_and_links_to_other_folders_are_not_its_files(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for place in ("mine", "mine/.git", "mine/deep"):
        (tmp_path / place).mkdir()
    for name in (
        "mine/a.jsonl",
        "mine/.a.jsonl",
        "mine/.git/b.jsonl",
        "mine/deep/c.jsonl",
        "elsewhere/d.jsonl",
    ):
        (tmp_path / name).write_bytes(as_lines([name]))
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path / "mine") == ["mine/a.jsonl", "mine/deep/c.jsonl"]
    assert read(tmp_path / "mine" / "**" / "*.jsonl") == [
        "mine/a.jsonl",
        "mine/deep/c.jsonl",
        "elsewhere/d.jsonl",
    ]


def test_a_folder_with_one_split_is_that_split(tmp_path: Path) -> None:
    (tmp_path / "validation-00000.jsonl").write_bytes(as_lines(["the only one"]))
    assert read(tmp_path) == ["the only one"]


def test_no_code_that_lies_beside_a_dataset_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(as_lines(["a row"]))
    code = f"open({str(tmp_path / 'was-run')!r}, 'w')\nraise SystemExit('code was run')\n"
    for name in ("train.py", "__init__.py", "builder.py"):
        (folder / name).write_text(code)
    assert read(folder) == list(HubStream(str(folder), "text").texts()) == ["a row"]
    (folder / "dataset.py").write_text(code)  # which was how such code was named
    with pytest.raises(DataError, match=r"found dataset\.py.*name the files themselves"):
        read(folder)
    assert not (tmp_path / "was-run").exists()


def test_a_streams_texts_are_read_as_a_files() -> None:
    class Given(HubStream):
        def __init__(self) -> None: ...

        def texts(self, seed: int | None = None, buffer: int = 0) -> Iterator[str | None]:
            return iter(["\ufeffmarked", "half \ud83d", "", None])

    assert [b"".join(blocks).decode() for blocks in Given().documents()] == ["marked", "half \ufffd"]
