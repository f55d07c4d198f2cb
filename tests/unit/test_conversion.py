"""A file that is no UTF-8 text: what it is, and a command that can be typed as it stands."""

from __future__ import annotations

import gzip
import random
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from node.data.conversion import encoding_of
from node.data.sources import documents_in
from protocol.errors import DataError

WRITINGS = {
    "English": "Once upon a time there was a file.\r\n",
    "German": "Größe, Maß und „Anführung“\n",
    "Russian": "Все счастливые семьи похожи друг на друга\n",
    "Chinese": "道可道，非常道。名可名，非常名。\n無名天地之始；有名萬物之母。 \n",
    "emoji": "a 🦆 and a 🐢 went for a swim\n",
}


def read(path: Path) -> None:
    for document in documents_in([path], "text"):
        list(document)


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_encodings_are_told_apart(encoding: str, writing: str) -> None:
    """With a mark always; without one where there are zeros, as of every space or line end."""
    expected = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    for repeated in (1, 500):
        assert encoding_of((WRITINGS[writing] * repeated).encode(encoding)) == expected


CHINESE = "道可道，非常道。名可名，非常名。\n无名天地之始；有名万物之母。\n" * 3
SEVEN_BITS = {
    "ISO-2022-JP": ("iso2022_jp", "日本語の文章です。\nかなと漢字。\n"),
    "ISO-2022-JP-2": ("iso2022_jp_2", "日本語と한국어と丂\n"),
    "ISO-2022-JP-3": ("iso2022_jp_ext", "ｱｲｳ と 日本語\n"),
    "ISO-2022-KR": ("iso2022_kr", "한국어 문장\n"),
    "HZ": ("hz", CHINESE),
    "UTF-7": ("utf-7", "Größe, Maß und „Anführung“ – für Käse\n"),
}


@pytest.mark.parametrize("encoding", SEVEN_BITS)
def test_letters_in_seven_bits_are_no_text_as_they_are(encoding: str, tmp_path: Path) -> None:
    codec, writing = SEVEN_BITS[encoding]
    raw = writing.encode(codec)
    assert raw.isascii()
    (tmp_path / "a.txt").write_bytes(b"The first lines are ASCII.\n" * 3 + raw)
    assert f"is {encoding} text. Convert it: " in refusal(tmp_path / "a.txt")


def test_chinese_of_iso_2022_is_known_by_its_escapes() -> None:
    """Python has no codec of it."""
    assert encoding_of(b"\x1b$)A\x0e5@?I5@\x0f\n") == "ISO-2022-CN"


@pytest.mark.parametrize(
    "text",
    [
        "(format t \"~{~a~^, ~}~%\" list) ~{~s~} ~{~d~}", "~{ab~} ~{cd~} only two", "C++ +1- +2- 1+1-", "a+bc-d " * 9,
        "+AAAA-+AAAA-+AAAA-", "\x1b[31mred\x1b[0m\x1b(B", "x+y-z, i+j-k, +abc-, +def-, +ghi-",
    ],
)  # fmt: skip
def test_signs_of_a_program_are_no_encoding(text: str) -> None:
    assert encoding_of(text.encode()) is None


def test_what_is_compressed_twice_is_not_taken_for_letters(tmp_path: Path) -> None:
    import bz2
    import lzma

    packers: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "bzip2": bz2.compress,
        "xz": lzma.compress,
    }
    for outer, pack in packers.items():
        for inner in packers.values():
            (tmp_path / "rows.jsonl.gz.gz").write_bytes(pack(inner(b'{"text": "a"}\n')))
            said = refusal(tmp_path / "rows.jsonl.gz.gz")
            assert (
                f"is compressed twice. Decompress it once: {outer} -dc {tmp_path}/rows.jsonl.gz.gz > " in said
            )


def test_what_is_binary_or_text_is_neither() -> None:
    generator = random.Random(0)
    for length in (8, 50, 5_000):
        assert encoding_of(b"\0" + generator.randbytes(length)) is None
    for head in (
        b"",
        b"a",
        b"\0",
        b"\0\0\0\0\0\0\0\0\0\0\0\0",
        b"\x7fELF\0\0\0\0\0\0",
        b"plain text, and more of it",
    ):
        assert encoding_of(head) is None


@pytest.mark.parametrize("name", ["plain.txt", "it's mine; really.txt", "$HOME.txt", "-f.txt"])
@pytest.mark.parametrize(
    ("contents", "program", "beside"),
    [
        (b"PK\x03\x04 and so on", "unzip", "{stem}-unpacked"),
        (bytes(257) + b"ustar  \0" + bytes(300), "mkdir", "{stem}-unpacked"),
        ("a text".encode("utf-16"), "iconv", "utf8-{name}"),
        ("größer".encode("latin-1"), "iconv", "utf8-{name}"),
        (gzip.compress("a text".encode("utf-16")), "gzip", "utf8-{stem}"),
        (gzip.compress("größer".encode("latin-1")), "gzip", "utf8-{stem}"),
    ],
    ids=["zip", "tar", "UTF-16", "Latin-1", "gzip of UTF-16", "gzip of Latin-1"],
)
def test_the_command_names_the_file_where_it_lies(
    contents: bytes, program: str, beside: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(contents)
    command = refusal(path).rpartition(": ")[2].removesuffix(".")
    words = shlex.split(command)
    assert words[0] == program
    assert str(path) in words
    assert str(tmp_path / beside.format(name=name, stem=path.stem)) in words
