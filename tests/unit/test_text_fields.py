"""The text of a row, wherever it is in it: nested, in lists, in conversations, as bytes; and rows that have none.

What `datasets` reads of the same file, joined in the same way, is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from node.data.documents import Split, stored_documents
from node.data.fields import text_of
from node.data.hub import HubStream
from node.data.sources import documents_in
from protocol.errors import DataError

Rows = Sequence[dict[str, Any]]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello\nyou"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


def as_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_array(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(rows), indent=1))


def as_parquet(path: Path, rows: Rows) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def as_arrow(path: Path, rows: Rows) -> None:
    table = pyarrow.Table.from_pylist(list(rows))
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


FORMS: dict[str, Callable[[Path, Rows], None]] = {
    "a.jsonl": as_lines,
    "a.json": as_array,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
}


def read(path: Path, field: str = "text") -> list[str]:
    return [b"".join(document).decode() for document in documents_in([path], field)]


def refusal(path: Path, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        read(path, field)
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    return said


NESTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "nested": ({"answer": {"text": "words"}}, "answer.text", "words"),
    "deeply nested": ({"a": {"b": {"c": "words", "d": 1}}}, "a.b.c", "words"),
    "a name with a dot": ({"answer.text": "words"}, "answer.text", "words"),
    "a name with a dot in another": ({"a.b": {"c.d": "words"}}, "a.b.c.d", "words"),
    "a list of strings": ({"lines": ["one", "two", None, "three"]}, "lines", "one\ntwo\nthree"),
    "a nested list": ({"answers": {"text": ["one", "two"], "at": [1, 2]}}, "answers.text", "one\ntwo"),
    "a list of them": ({"parts": [{"text": "one"}, {"text": "two"}]}, "parts.text", "one\ntwo"),
    "a conversation": ({"messages": TALK}, "messages", "user: hi\nassistant: hello\nyou"),
    "one of ShareGPT": ({"conversations": SHARED}, "conversations", "human: hi\ngpt: hello"),
    "a nested one": ({"chat": {"messages": TALK}}, "chat.messages", "user: hi\nassistant: hello\nyou"),
    "what is said in it": ({"messages": TALK}, "messages.content", "hi\nhello\nyou"),
    "lists of it": ({"messages": {"role": ["a", "b"], "content": ["1", "2"]}}, "messages", "a: 1\nb: 2"),
    "a call in it": ({"messages": [*TALK[:1], {"role": "tool", "content": None}]}, "messages", "user: hi"),
    "parts in it": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": each} for each in ("hi", "you")]}]},
        "messages",
        "user: hi\nyou",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", NESTED)
def test_a_text_within_others_is_named_by_dots(kind: str, form: str, tmp_path: Path) -> None:
    row, field, text = NESTED[kind]
    FORMS[form](tmp_path / form, [row] * 3)
    assert read(tmp_path / form, field) == [text] * 3
    assert list(HubStream(str(tmp_path), field).texts()) == [text] * 3, "as the library reads it"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", NESTED)
def test_the_advice_is_followed_to_its_end(kind: str, form: str, tmp_path: Path) -> None:
    """By what each refusal names there is text, after two of them at most."""
    row, wanted, text = NESTED[kind]
    FORMS[form](tmp_path / form, [row])
    field = "text"
    for _ in range(2):
        try:
            read(tmp_path / form, field)
        except DataError as error:
            named = str(error).rpartition("there is ")[2].rstrip(".").split(", ")
            field = (
                wanted if wanted in named else next(name for name in named if wanted.startswith(f"{name}."))
            )
    assert read(tmp_path / form, field) == (
        [text] if field == wanted else ["user: hi\nassistant: hello\nyou"]
    )


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        ({"answer": {"text": "a"}}, "answer", ("holds an object, not text", "there is answer.text.")),
        ({"answer": {"text": "a"}}, "answer.txt", ("no field 'answer.txt'", "there is answer.text.")),
        ({"text": "a"}, "text.more", ("no field 'text.more'", "there is text.")),
        ({"rows": [{"body": "a"}]}, "rows", ("holds a list of object, not text", "there is rows.body.")),
        ({"text": 3, "body": "a"}, "text", ("holds int, not text", "there is body.")),
        ({"text": [1, 2], "body": "a"}, "text", ("holds a list of int, not text", "there is body.")),
        ({"text": ["a", 2], "body": "a"}, "text", ("not text", "there is body.")),
        ({"text": True, "n": 2.5}, "text", ("holds bool, not text", "there is text, n.")),
        ({"text": [["a"]], "body": "a"}, "text", ("holds a list of a list of str", "there is body.")),
        ({"messages": [*TALK, {"role": "x", "content": {"a": 1}}]}, "messages", ("not text", "messages.role")),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named_with_what_is(
    row: dict[str, Any], field: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    as_lines(tmp_path / "a.jsonl", [row])
    found = refusal(tmp_path / "a.jsonl", field)
    for words in said:
        assert words in found


@pytest.mark.parametrize("form", ["a.parquet", "a.arrow"])
def test_bytes_are_utf8_or_refused(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path / form, [{"text": "größer".encode()}, {"text": None}, {"text": b"more"}])
    assert read(tmp_path / form) == ["größer", "more"]
    FORMS[form](tmp_path / form, [{"text": b"good"}, {"text": b"\xff\xd8\xff"}])
    assert "row 2: 'text' holds bytes that are not UTF-8" in refusal(tmp_path / form)


def test_a_dictionary_and_long_strings_are_text(tmp_path: Path) -> None:
    texts = pyarrow.array(["one", "two", "one"])
    for number, column in enumerate(
        (texts.dictionary_encode(), texts.cast("large_string"), texts.cast("string_view"))
    ):
        with pyarrow.ipc.new_file(
            tmp_path / f"{number}.arrow", pyarrow.schema([("text", column.type)])
        ) as writer:
            writer.write(pyarrow.record_batch({"text": column}))
        assert read(tmp_path / f"{number}.arrow") == ["one", "two", "one"]


def test_nested_text_that_is_not_utf8_is_a_sentence(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xe9")]
    )
    table = pyarrow.table({"answer": pyarrow.StructArray.from_arrays([bad], ["text"])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "holds text that is not UTF-8" in refusal(tmp_path / "a.parquet", "answer.text")


# --- rows that have no text, or not one ---------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "texts"),
    [
        (b'{"text":"a"}\n{"text":null}\n{"text":""}\n{"text":"b"}\n', ["a", "b"]),
        (b'{"text":"a"}\n{"text":NaN}\n{"text":"b"}\n', ["a", "b"]),
        (b'{"text":"a"}{"text":"b"}\n{"text":"c"}\n', ["a", "b", "c"]),
        (b'{"text":"a"} {"text":"b"}', ["a", "b"]),
        (b'{"text":"a"},\n{"text":"b"},\n', ["a", "b"]),
        (b'{"text":"a"}\r{"text":"b"}\r', ["a", "b"]),
        (b'\n\n{"text":"a"}\n \n{"text":"b"}', ["a", "b"]),
        (b'[{"text":"a"}]\n[{"text":"b"}]\n', ["a", "b"]),
        (b'[{"text":"a"}][]{"text":"b"}', ["a", "b"]),
        (b'\xef\xbb\xbf{"text":"a"}\n\xef\xbb\xbf{"text":"b"}\n', ["a", "b"]),
        (b'{"text":"a","id":1,"id":2}\n', ["a"]),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_no_object_of_json_is_lost(name: str, contents: bytes, texts: list[str], tmp_path: Path) -> None:
    if name == "a.txt" and contents.startswith(b"\n"):
        contents = contents.lstrip()
    (tmp_path / name).write_bytes(contents)
    assert read(tmp_path / name) == texts


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b'{"text":"a"}\n{"x":1}\n', ":2 has no field 'text'"),
        (b'{"text":"a"}\n{"text":3}\n', ":2: 'text' holds int, not text"),
        (b'{"text":"a"}\n{"text":"b"\n', ":2 is not JSON"),
        (b'{"text":"a"} and more\n', ":1 is not JSON"),
        (b'{"text":"a"}\n"b"\n', ":2 is not a JSON object"),
        (b'{"text":"a","text":"b"}\n', ":1 has the field 'text' twice"),
        (b'[{"text":"a"},{"text":"a","text":"b"}]', ", object 2 has the field 'text' twice"),
        (b'[{"text":"a"}]and more', "is not whole JSON"),
        (b'[{"text":"a"}, "b"]', ", object 2 is not a JSON object"),
        (b'{"text":"a"}\n{"text":' + b"[" * 100_000 + b"\n", ":2 is not JSON"),
        (b'[{"text":' + b"[" * 100_000, "nests too deeply"),
        (b'{"text":"a"}\n{"text":"b", "n":' + b"1" * 5_000 + b"}\n", ":2 is not JSON"),
        (b'{"text":"a"}\n\0\0\0\0', "has NUL bytes"),
        (b'{"text":"a\nb"}\n', "is not"),
        (b'["one", "two"]', "object 1 is not a JSON object"),
    ],
)
def test_json_that_loses_something_is_refused(contents: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(contents)
    assert said in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("contents", "texts"),
    [
        (b"text,id\na,1\n\nb,2\n", ["a", "b"]),
        (b'text,id\n"a, b",1\n"c ""d"" e",2\n', ["a, b", 'c "d" e']),
        (b'id,text\r\n1,"a\r\nb"\r\n', ["a\r\nb"]),
        (b"id,text\r1,a\r2,b\r", ["a", "b"]),
        (b"text\na\n\nb", ["a", "b"]),
        (b'id,text\n1,a "quoted" b\n', ['a "quoted" b']),
    ],
)
def test_rows_of_csv_are_whole(contents: bytes, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(contents)
    assert read(tmp_path / "a.csv") == texts == list(HubStream(str(tmp_path), "text").texts())


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"text,id\na,1\nb\n", ":3: this row has 1 fields, and the first row names 2"),
        (b"text,id\na,1\nb,2,3\n", ":3: this row has 3 fields"),
        (b"text\nHello, world\n", "Put a text that has ',' in it between quotes"),
        (b"text\nHello,\n", ":2: this row has 2 fields"),
        (b"id;text\n1;a;b\n", "has ';' in it"),
        (b'id,text\n1,"a\n2,b\n3,"c\n', ":2 is not CSV"),
        (b'text,id\na,1\n"abc"def,2\n', ":3 is not CSV"),
        (b"sep=;\nid;text\n1;a;b\n", ":3: this row has 3 fields"),
        (b"id,text\n" + b"1,a\n" * 900_000 + b"2,\0\0\n", "this row has NUL bytes"),
        (b"Once upon a time\n", "has no column 'text' in its first row, which names them"),
    ],
)
def test_csv_that_loses_something_is_refused(contents: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(contents)
    assert said in refusal(tmp_path / "a.csv")


def test_a_line_for_spreadsheets_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=;\nid;text\n1;a\n")
    assert read(tmp_path / "a.csv") == ["a"]


def test_a_tsv_row_with_too_many_tabs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("id\ttext\n1\ta\tb\n")
    assert "this row has 3 fields" in refusal(tmp_path / "a.tsv")


def test_conversations_become_documents_of_a_run(tmp_path: Path) -> None:
    as_lines(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": []}])
    found = stored_documents([str(tmp_path / "a.jsonl")], "messages", 16_384, Split(0.0), tmp_path / "cache")
    assert list(found.training((0,), 0, 0)) == ["user: hi\nassistant: hello\nyou"]


def test_an_object_that_nests_within_itself_is_named_in_a_line() -> None:
    deep: dict[str, Any] = {"end": "text"}
    for _ in range(50):
        deep = {"a": deep}
    with pytest.raises(DataError) as caught:
        text_of(deep, "text", "here")
    assert len(str(caught.value)) < 400
