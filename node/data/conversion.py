"""Advice for a file that is not UTF-8 text: the command that makes text of it, for the file where it lies."""

from __future__ import annotations

import codecs
import unicodedata
from pathlib import Path

from node.machine.named import quoted
from protocol.errors import DataError

LATIN_1 = "LATIN1"
_MARKS = (  # the longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_WITHOUT_MARK = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")
_LOOKED_AT = 4_096  # bytes at a file's beginning
_FEWEST = 32  # bytes that tell an encoding without a mark
_NO_TEXT = ("Cc", "Cn", "Co", "Cs")  # control characters, and what no character has
_ZIP = b"PK\x03\x04"
_TAR_AT, _TAR = 257, b"ustar"
GZIP, BZIP2, XZ, ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
_DECOMPRESSED_BY = {GZIP: "gzip -dc", BZIP2: "bzip2 -dc", XZ: "xz -dc", ZSTD: "zstd -dc"}


def require_text(path: Path, head: bytes, start: bytes) -> None:
    """Check that a file that begins with `head` needs no other program before it is text. Raises `DataError`.

    `start` is how the file begins before it is decompressed.
    """
    source, folder = quoted(path), quoted(path.with_name(f"{path.stem}-unpacked"))
    if head.startswith(_ZIP):
        raise DataError(
            f"{path} is a zip archive. Unpack it and name the files in it: unzip {source} -d {folder}."
        )
    if head[_TAR_AT:].startswith(_TAR):
        raise DataError(
            f"{path} is a tar archive. Unpack it and name the files in it: "
            f"mkdir {folder} && tar -xf {source} -C {folder}."
        )
    if encoding := encoding_of(head):
        raise DataError(f"{path} is {encoding} text. Convert it: {converted(path, start, encoding)}.")


def converted(path: Path, start: bytes, encoding: str) -> str:
    """The command that writes the file's text as UTF-8 beside it, under another name."""
    source, target = (
        quoted(path),
        quoted(path.with_name(f"utf8-{_without_ending(path, start)}")),
    )
    by = next((by for magic, by in _DECOMPRESSED_BY.items() if start.startswith(magic)), None)
    if by is not None:
        return f"{by} {source} | iconv -f {encoding} -t UTF-8 > {target}"
    return f"iconv -f {encoding} -t UTF-8 {source} > {target}"


def _without_ending(path: Path, start: bytes) -> str:
    """Return the file's name without the ending of a compression: what comes out of the command is not compressed."""
    return path.stem if start.startswith(tuple(_DECOMPRESSED_BY)) and path.suffix else path.name


def encoding_of(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by a byte order mark; without one, where the zeros in it make sense as one of them."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    looked_at = head[:_LOOKED_AT]
    if len(looked_at) < _FEWEST or b"\0" not in looked_at:
        return None
    return next((name for name in _WITHOUT_MARK if _is_text(looked_at, name)), None)


def _is_text(head: bytes, encoding: str) -> bool:
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)  # a character cut at the end is left out
    except UnicodeDecodeError:
        return False
    return all(letter in "\t\n\r\f" or unicodedata.category(letter) not in _NO_TEXT for letter in text)
