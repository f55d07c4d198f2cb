"""Any file of text, changed in one way: its documents are the same, or a sentence says why not.

The changes: a cut anywhere, a byte order mark, another encoding, other line ends, a wrong ending of its name, and a
compression, also cut. What is cut where nothing shows it has lost documents or letters of its end, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from node.data.hub import HubStream
from node.data.sources import documents_in, places_of
from protocol.errors import DataError
from tests.unit.test_ways_to_name import COLUMNS, FORMS, WAYS

TEXTS = ["one", 'zwölf, or "12"', "three; 3 | three\t4"]
PLAIN = "größer than\na line\n"
KEPT: dict[str, tuple[str, Callable[[Sequence[str]], bytes]]] = FORMS | {
    "text": ("a.txt", lambda _: PLAIN.encode())
}
NAMES = ["a.txt", "a.md", "a", *sorted({name for name, _ in FORMS.values()})]
LIBRARYS = (
    "lines",
    "lines as .json",
    "array",
    "csv",
    "marked csv",
    "tsv",
    "parquet",
    "arrow file",
    "arrow stream",
)


def outcome(path: Path) -> list[str] | None:
    """The documents; None where a sentence refuses them."""
    try:
        return [b"".join(blocks).decode() for blocks in documents_in(places_of([str(path)]), "text")]
    except DataError as error:
        said = str(error)
        assert str(path) in said
        assert "\n" not in said
        assert len(said) < 600
        return None


def expected(form: str) -> list[str]:
    return [PLAIN] if form == "text" else TEXTS


def kept(form: str) -> bytes:
    return KEPT[form][1](TEXTS)


@pytest.mark.parametrize("form", KEPT)
def test_a_cut_anywhere(form: str, tmp_path: Path) -> None:
    path, raw, whole = tmp_path / KEPT[form][0], kept(form), expected(form)
    for end in range(0, len(raw), 11 if form in COLUMNS else 1):
        path.write_bytes(raw[:end])
        found = outcome(path)
        if form == "text":
            assert found is None or PLAIN.startswith(found[0])
        else:
            assert found is None or found == whole[: len(found)], raw[:end]


@pytest.mark.parametrize("form", [form for form in KEPT if form not in COLUMNS])
def test_a_compression_that_is_cut_anywhere(form: str, tmp_path: Path) -> None:
    for ending, compress in WAYS:
        path, raw = tmp_path / (KEPT[form][0] + ending), compress(kept(form))
        path.write_bytes(raw)
        assert outcome(path) == expected(form)
        for end in range(6, len(raw), 5):
            path.write_bytes(raw[:end])
            assert outcome(path) is None


@pytest.mark.parametrize("form", KEPT)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_ending(name: str, form: str, tmp_path: Path) -> None:
    for ending, compress in [("", bytes), (".gz", bytes), *(WAYS if form not in COLUMNS else ())]:
        path = tmp_path / (name + ending)
        path.write_bytes(compress(kept(form)))
        assert outcome(path) in (None, expected(form))


@pytest.mark.parametrize("form", KEPT)
def test_a_mark_and_another_encoding(form: str, tmp_path: Path) -> None:
    path = tmp_path / KEPT[form][0]
    path.write_bytes(b"\xef\xbb\xbf" + kept(form).removeprefix(b"\xef\xbb\xbf"))
    assert outcome(path) in ([None] if form in COLUMNS else [expected(form)])
    if form not in COLUMNS:
        for encoding in ("utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
            path.write_bytes(kept(form).decode("utf-8-sig").encode(encoding))
            assert outcome(path) is None


@pytest.mark.parametrize("form", [form for form in KEPT if form not in COLUMNS])
@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n\n"])
def test_foreign_line_ends(end: bytes, form: str, tmp_path: Path) -> None:
    path = tmp_path / KEPT[form][0]
    raw = kept(form).replace(b"\r\n", b"\n").replace(b"\n", end)
    path.write_bytes(raw)
    assert outcome(path) == ([raw.decode()] if form == "text" else TEXTS)


@pytest.mark.parametrize("form", FORMS)
def test_the_library_reads_the_same(form: str, tmp_path: Path) -> None:
    path = tmp_path / FORMS[form][0]
    path.write_bytes(kept(form))
    try:
        of_library = list(HubStream(str(tmp_path), "text").texts())
    except DataError:
        assert form not in LIBRARYS
        return
    assert of_library == outcome(path) == TEXTS


@pytest.mark.parametrize(
    "text",
    [
        "text, id\nand so on", "id,text", "id,text\nno comma", "text\nalone", 'a "text, b\n', "text\r",
        "the text, said she,\nis a, b", "a text,b\rc,d\r", "text," * 50_000, "x" * 300_000 + ", text\n1,2",
    ],
)  # fmt: skip
def test_text_that_looks_a_little_like_csv_is_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert outcome(tmp_path / "a.txt") == [text]
