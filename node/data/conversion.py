"""Advice for a file that is not UTF-8 text: the command that makes text of it, for the file where it lies."""

from __future__ import annotations

import codecs
import re
import unicodedata
from pathlib import Path

from node.data.beginnings import kind_of
from node.machine.kinds import advice_for
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
_FEWEST = 32  # bytes that tell an encoding without a mark, and text from other bytes
_MOST_ODD = 0.05  # of the letters behind a mark: newer than this Python's tables, or of private use
_ASCII = bytes(range(0x20, 0x7F)) + b"\r\n"
_NO_TEXT = ("Cc", "Cn", "Co", "Cs")  # control characters, and what no character has
_CONTROLS = re.compile("[\0-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")  # which texts have none of, or few
_FEW = 20  # one in so many letters: of compressed or random bytes one in ten is one
_TAR = "a tar archive"  # whose program decompresses it, too
# of ISO-2022 in Japanese, Korean and Chinese; a terminal's colours and its ESC ( B are none
_ESCAPES = re.compile(rb"\x1b(?:\$[@AB]|\$\([CDOPQ]|\$\)[ACG]|\$\*H|\([IJ])")
_ISO_2022 = (  # as iconv names them, and as Python does
    ("ISO-2022-JP", "iso2022_jp"), ("ISO-2022-JP-2", "iso2022_jp_2"), ("ISO-2022-JP-3", "iso2022_jp_3"),
    ("ISO-2022-JP-3", "iso2022_jp_ext"), ("ISO-2022-KR", "iso2022_kr"),
)  # fmt: skip
_HZ_NAME = "HZ"
_BY_PYTHON = (
    "python3 -c 'import sys; sys.stdout.buffer.write(sys.stdin.buffer.read().decode(\"hz\").encode())'"
)
_HZ = re.compile(rb"~\{(?:[!-w][!-~])+~\}")
_UTF_7 = re.compile(rb"\+[A-Za-z0-9/][A-Za-z0-9+/]{2,}-")
_FEWEST_GROUPS = 3  # by which HZ and UTF-7 are told from a program's braces and signs
GZIP, BZIP2, XZ, ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
_DECOMPRESSED_BY = {GZIP: "gzip -dc", BZIP2: "bzip2 -dc", XZ: "xz -dc", ZSTD: "zstd -dc"}


def require_known(path: Path, head: bytes, start: bytes) -> None:
    """Check that a file that begins with `head` is of no kind that is known to be no text. Raises `DataError`.

    `start` is how the file begins before it is decompressed.
    """
    by_whom = _decompressed_by(start)
    if by_whom is not None and _decompressed_by(head) is not None:
        plain = quoted(path.with_name(f"once-{_without_ending(path, start)}"))
        raise DataError(
            f"{path} is compressed twice. Decompress it once: {by_whom} {quoted(path)} > {plain}."
        )
    kind = kind_of(head)
    if kind is None:
        return
    advice = advice_for(kind, path)
    if kind.what != _TAR and (by := by_whom) is not None:
        plain = quoted(path.with_name(f"plain-{_without_ending(path, start)}"))
        advice = f"It is compressed, too; decompress it first: {by} {quoted(path)} > {plain}."
    raise DataError(f"{path} is {kind.what}, not text. {advice}")


def require_text(path: Path, head: bytes, start: bytes) -> None:
    """Check that a file that begins with `head` can be UTF-8 text. Raises `DataError`; `start` as above."""
    if encoding := encoding_of(head):
        raise DataError(f"{path} is {encoding} text. Convert it: {converted(path, start, encoding)}.")
    if b"\0" in head:
        raise has_nul(path)


def has_nul(path: Path) -> DataError:
    return DataError(
        f"{path} has NUL bytes: it is no text. Leave it out, or name the texts that it was made of."
    )


def has_controls(path: Path) -> DataError:
    return DataError(
        f"{path} is full of control characters: it is no text. Leave it out, or name the texts that it was made of."
    )


def not_utf8(path: Path, place: int, around: bytes, start: bytes, is_damaged: bool) -> DataError:
    """The error for a text file with bytes that are not UTF-8 near `place`, with those `around` it.

    `is_damaged` where what comes before is UTF-8 beyond ASCII, which would be rubbish in another encoding.
    """
    if is_controls(around):
        return has_controls(path)
    if is_damaged:
        command = converted(path, start, "UTF-8").replace("iconv ", "iconv -c ")
        return DataError(
            f"{path} is UTF-8 text with bytes in it that are none (near byte {place:,}). Write it without these: "
            f"{command}."
        )
    return DataError(
        f"{path} is not UTF-8 text (near byte {place:,}). Convert it from its encoding, which is {LATIN_1} in this "
        f"command: {converted(path, start, LATIN_1)}."
    )


def rows_not_utf8(path: Path, found: int, rows: int, start: bytes, *, has_columns: bool) -> DataError:
    """Return the error for a file of `rows` rows, nearly all of which are in another encoding than UTF-8."""
    told = f"{path} is in another encoding than UTF-8, as {found:,} of its first {rows:,} rows show."
    if has_columns:  # parquet and its like: no program converts the file as it is
        return DataError(f"{told} Write it again with its text as UTF-8.")
    return DataError(
        f"{told} Convert it from its encoding, which is {LATIN_1} in this command: {converted(path, start, LATIN_1)}."
    )


def is_controls(block: bytes) -> bool:
    """Return whether more than a few of its letters are control characters that texts have not."""
    looked_at = block[:_LOOKED_AT]
    if len(looked_at) < _FEWEST:
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(looked_at)
    except UnicodeDecodeError:  # in other encodings the bytes from 0x80 on are letters
        text = looked_at.decode("ascii", errors="replace")
    return (len(text) - len(_CONTROLS.sub("", text))) * _FEW > len(text)


def converted(path: Path, start: bytes, encoding: str) -> str:
    """The command that writes the file's text as UTF-8 beside it, under another name."""
    source, target = (
        quoted(path),
        quoted(path.with_name(f"utf8-{_without_ending(path, start)}")),
    )
    by = _decompressed_by(start)
    if encoding == _HZ_NAME:  # which glibc's iconv does not know
        program = f"{_BY_PYTHON} > {target}"
        return f"{program} < {source}" if by is None else f"{by} {source} | {program}"
    if by is not None:
        return f"{by} {source} | iconv -f {encoding} -t UTF-8 > {target}"
    return f"iconv -f {encoding} -t UTF-8 {source} > {target}"


def _decompressed_by(start: bytes) -> str | None:
    return next((by for magic, by in _DECOMPRESSED_BY.items() if start.startswith(magic)), None)


def _without_ending(path: Path, start: bytes) -> str:
    """Return the file's name without the ending of a compression: what comes out of the command is not compressed."""
    return path.stem if start.startswith(tuple(_DECOMPRESSED_BY)) and path.suffix else path.name


def encoding_of(head: bytes) -> str | None:
    """The encoding that a text is in where its first bytes show one; None for UTF-8, and where none can be told.

    UTF-16 or UTF-32, by a byte order mark or by the zeros in it, where it makes text as one of them; or one of those
    that write all letters in seven bits, so that their bytes pass for UTF-8.
    """
    if head.isascii() and (name := _of_seven_bits(head)) is not None:
        return name
    looked_at = head[:_LOOKED_AT]
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name if _is_text(looked_at, name, _MOST_ODD) else None
    if len(looked_at) < _FEWEST or b"\0" not in looked_at or _has_letters_of_a_byte(looked_at):
        return None
    return next((name for name in _WITHOUT_MARK if _is_text(looked_at, name)), None)


def _of_seven_bits(head: bytes) -> str | None:
    """ISO-2022 by its escapes, HZ by its braces, UTF-7 by its groups, where all of the head makes text as that."""
    if _ESCAPES.search(head):
        if b"\x1b$)A" in head or b"\x1b$)G" in head or b"\x1b$*H" in head:  # of which Python has no codec
            return "ISO-2022-CN"
        return next((name for name, codec in _ISO_2022 if _makes_letters(head, codec)), None)
    if len(_HZ.findall(head)) >= _FEWEST_GROUPS and _makes_letters(head, _HZ_NAME):
        return _HZ_NAME
    if len(_UTF_7.findall(head)) >= _FEWEST_GROUPS and _makes_letters(
        head[: head.rfind(b"\n") + 1] or head, "UTF-7"
    ):
        return "UTF-7"
    return None


def _makes_letters(head: bytes, encoding: str) -> bool:
    """Return whether it is text in that encoding, with letters beyond ASCII."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    beyond = [letter for letter in text if not letter.isascii()]
    return bool(beyond) and all(unicodedata.category(letter) not in _NO_TEXT for letter in beyond)


def _has_letters_of_a_byte(head: bytes) -> bool:
    """Return whether its bytes between the zeros are text as they are: pairs of them make rare Chinese characters."""
    rest = head.replace(b"\0", b"")
    return len(rest) > 0.6 * len(head) and len(rest.translate(None, _ASCII)) < 0.1 * len(rest)


def _is_text(head: bytes, encoding: str, most_odd: float = 0.0) -> bool:
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)  # a character cut at the end is left out
    except UnicodeDecodeError:
        return False
    odd = sum(letter not in "\t\n\r\f" and unicodedata.category(letter) in _NO_TEXT for letter in text)
    return odd <= most_odd * len(text)
