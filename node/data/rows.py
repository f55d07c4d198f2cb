"""The texts of files that hold them in rows: JSON, CSV, parquet, Arrow.

Bytes that are not UTF-8 come as lone surrogates (`surrogateescape`), whatever the format: `mended` replaces them.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from node.data.contents import BLOCK_BYTES, is_compressed, opened, plain_name, without_mark
from node.data.fields import Doubled, choice, first_of, has, text_of
from node.machine.limits import optional
from protocol.errors import DataError

Texts: TypeAlias = Iterator[str | None]

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
CSV_ENDINGS = (".csv", ".tsv")
PARQUET = b"PAR1"  # how these files begin
_ARROW_FILE, _ARROW_STREAM = ARROW = b"ARROW1", b"\xff\xff\xff\xff"
_LONGEST = 2**26  # bytes of a row: more is no document but a mistake
_ROWS_AT_ONCE = 256
_DELIMITERS = ",;\t|"  # the second is what spreadsheets write where the decimal sign is a comma
_TITLE_LINES = 20  # which a table may have above its columns' names
_BETWEEN = re.compile(r"[\s,]*")
_BYTE = re.compile("[\udc80-\udcff]")  # surrogates that stand for bytes which are not UTF-8
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # surrogates that stand for no byte


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        found = Doubled(pairs)
        found.twice = frozenset(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
    return found


# NaN, which is no JSON, is what pandas writes for a text that is missing
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=lambda _: None)


def mended(text: str) -> str:
    """The text with U+FFFD for what is not UTF-8, as `errors="replace"` gives of the bytes."""
    raw = _NO_BYTE.sub("\ufffd", text).encode("utf-8", errors="surrogateescape")
    return raw.decode("utf-8", errors="replace")


def has_other_bytes(text: str) -> bool:
    """Return whether the text has bytes that are not UTF-8; half a character, as JSON can spell it, is none."""
    return _BYTE.search(text) is not None


def has_columns_in(path: Path) -> bool:
    """Return whether a file is parquet or Arrow."""
    with opened(path) as file:
        return file.peek().startswith((PARQUET, *ARROW))


# --- JSON ---------------------------------------------------------------------------------------


def json_texts(path: Path, field: str) -> Texts:
    """JSON lines, one array of objects, or objects over several lines: which, its beginning says."""
    with opened(path) as file:
        head = _decoded(without_mark(file.peek(BLOCK_BYTES)[:BLOCK_BYTES]))
        if _is_by_lines(head):
            yield from _json_lines(file, field, path)
        else:
            yield from _json_values(file, field, path)


def begins_with_row(head: bytes, field: str) -> bool:
    """Return whether a file that begins so is JSON with its text in `field`, whatever its name ends in."""
    start = _decoded(head).lstrip()
    value, _ = _value_at(start, len(start) - len(start.removeprefix("[").lstrip()))
    return has(value, field)


def _is_by_lines(head: str) -> bool:
    """Return whether JSON is by lines: an array is not, nor an object that goes on over a line's end."""
    start = head.lstrip()
    first, _, rest = start.partition("\n")
    if start.startswith("["):
        return False
    if not rest:
        return len(head) < BLOCK_BYTES  # of a longer line the end is not waited for
    value, end = _value_at(start, 0)
    return value is None or end <= len(first)


def _value_at(text: str, place: int) -> tuple[object, int]:
    """The JSON value there and its end; None where there is no whole one."""
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _json_lines(file: io.BufferedReader, field: str, path: Path) -> Texts:
    is_first = True
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
        where = f"{path}:{number}"
        if len(line) >= _LONGEST:
            raise DataError(f"{where} is longer than {_LONGEST >> 20} MiB. Is this JSON lines? Split it.")
        for value in _values_in(_decoded(without_mark(line)), where):
            yield _text_of(value, field, where, "Each line must be one", is_first=is_first)
            is_first = False


def _values_in(line: str, where: str) -> Iterator[object]:
    """The line's object, or several one after another."""
    place = _end_of_gap(line, 0)
    while place < len(line):
        try:
            value, place = _DECODER.raw_decode(line, place)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is not JSON ({str(error)[:80]}). Correct or delete this line; each line must be one object."
            ) from None
        yield value
        place = _end_of_gap(line, place)


def _json_values(file: io.BufferedReader, field: str, path: Path) -> Texts:
    """Objects one after another, in arrays or not; no more than one of them and some blocks are in memory."""
    reader = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
    rest, number, is_array = "", 0, False
    while more := reader.read(max(BLOCK_BYTES, len(rest))):  # twice as much each time: not read over and over
        rest += more
        start = _end_of_gap(rest, 0)
        while start < len(rest):  # the values of what is in memory
            if rest[start] == ("]" if is_array else "["):
                is_array, start = not is_array, _end_of_gap(rest, start + 1)
                continue
            value, end = _value_at(rest, start)
            if end == start:
                break
            number += 1
            yield _text_of(value, field, f"{path}, object {number}", "Each must be one", is_first=number == 1)
            start = _end_of_gap(rest, end)
        rest = rest[start:]
        if len(rest) >= _LONGEST:
            raise DataError(f"{path}, object {number + 1}, has more than {_LONGEST >> 20} MiB. Split it.")
    if rest or is_array:
        raise DataError(
            f"{path} is not whole JSON: it breaks off, is damaged, or nests too deeply, after {number:,} objects. "
            "Fetch it again, or correct that place."
        )


def _end_of_gap(text: str, place: int) -> int:
    found = _BETWEEN.match(text, place)
    return found.end() if found else place


def _text_of(row: object, field: str, where: str, rule: str, *, is_first: bool) -> str | None:
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object. {rule}, with text in field {field!r}.")
    return text_of(row, field, where, is_first=is_first)


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", errors="surrogateescape")


# --- CSV ----------------------------------------------------------------------------------------


_END = ["end", "of", "file"]


def csv_texts(path: Path, field: str) -> Texts:
    """Rows of a CSV or TSV file; its first row names the columns."""
    csv.field_size_limit(_LONGEST)  # of the whole process, whose only CSV these are; 128 KiB unless it is set
    with opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        header, begins = _header_of(text)
        above = begins
        mark = _delimiter(header, field, "\t" if plain_name(path).endswith(".tsv") else ",")
        names = next(csv.reader([header], delimiter=mark), [])
        if field not in names and (place := _later_header(text, field, begins)):
            raise DataError(
                f"{path} names its columns in line {place}, not in its first row. Delete the lines above that one."
            )
        if field not in names:
            names = max(
                (next(csv.reader([header], delimiter=each), []) for each in (mark, *_DELIMITERS)), key=len
            )
            raise DataError(
                f"{path} has no column {field!r} in its first row, which names them. {choice(names)}"
            )
        column = names.index(field)
        lines = _LinesAndEnd(text, mark.join(_END))
        rows = csv.reader(lines, delimiter=mark, strict=True)
        try:
            for row in rows:
                if lines.are_over and row == _END:
                    return
                _require_whole(row, len(names), mark, f"{path}:{begins}")
                yield row[column] if row else None
                begins = rows.line_num + above
        except csv.Error as error:
            if lines.are_over:
                raise DataError(
                    f"{path}:{begins}: a quote of this row is not closed to the end of the file. Close it, or delete "
                    "the row."
                ) from None
            if "field limit" in str(error):
                raise DataError(f"{path}:{begins} has more than {_LONGEST >> 20} MiB. Split it.") from None
            raise DataError(
                f"{path}:{begins} is not CSV ({error}). Correct this row, as by writing a quote within quotes twice, "
                "or delete it."
            ) from None


def _header_of(text: io.TextIOWrapper) -> tuple[str, int]:
    """The first row, which names the columns, and the number of the line behind it; empty lines above are no rows."""
    number = 0
    while line := text.readline(BLOCK_BYTES):
        number += 1
        is_for_spreadsheets = number == 1 and line.lower().startswith("sep=")
        if line.strip() and not is_for_spreadsheets:
            break
    return line, number + 1


def _later_header(text: io.TextIOWrapper, field: str, first: int) -> int:
    """The number of a line, of the first few from line `first` on, that has the field among others; 0 for none."""
    for number, line in enumerate((text.readline(BLOCK_BYTES) for _ in range(_TITLE_LINES)), first):
        for mark in _DELIMITERS if field in line else ():
            names = next(csv.reader([line], delimiter=mark), [])
            if field in names and len(names) > 1:
                return number
    return 0


def _require_whole(row: list[str], count: int, mark: str, where: str) -> None:
    """Check that a row, unless it is empty, has a field for each column: in one that has not, text may be cut."""
    if row and len(row) != count:
        raise DataError(
            f"{where}: this row has {len(row)} fields, and the first row names {count}. Put a text that has {mark!r} "
            "in it between quotes, or correct or delete the row."
        )
    if any("\0" in cell for cell in row):
        raise DataError(f"{where}: this row has NUL bytes. Delete it, or fetch the file again.")


def begins_with_header(head: bytes, field: str) -> bool:
    """Return whether a file that begins so is CSV with a column `field` beside others, whatever its name ends in."""
    lines = io.StringIO(_decoded(head), newline="")
    header = lines.readline()
    if field not in header:
        return False
    csv.field_size_limit(_LONGEST)
    try:
        mark = _delimiter(header, field, ",")
        names, first = next(csv.reader([header], delimiter=mark)), next(csv.reader(lines, delimiter=mark), [])
    except csv.Error:
        return False
    return field in names and 1 < len(names) == len(first)


class _LinesAndEnd:
    """The lines of a file and one more, a row of its own unless a quote is still open. Mutable: the place."""

    def __init__(self, lines: Iterable[str], end: str) -> None:
        self.are_over = False
        self._lines = iter(lines)
        self._end = end

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.are_over:
            raise StopIteration
        line = next(self._lines, None)
        self.are_over = line is None
        return self._end if line is None else line


def _delimiter(header: str, field: str, usual: str) -> str:
    """The usual one, unless only another makes a column of `field`."""
    marks = [usual, *_DELIMITERS]
    return next((mark for mark in marks if field in next(csv.reader([header], delimiter=mark), [])), usual)


# --- columns ------------------------------------------------------------------------------------


def parquet_texts(path: Path, field: str) -> Texts:
    parquet = _columns_of(path, "pyarrow.parquet", "parquet")
    try:
        with _source(path) as source, parquet.ParquetFile(source) as file:
            name = _column_of(file.schema_arrow, field, path)
            batches = file.iter_batches(_ROWS_AT_ONCE, columns=[name])
            yield from _texts_of(batches, name, field, path)
    except (optional("pyarrow", "data").ArrowException, OSError) as error:
        raise _damaged(path, "parquet", error) from None


def arrow_texts(path: Path, field: str) -> Texts:
    """An Arrow file or stream."""
    ipc = _columns_of(path, "pyarrow.ipc", "Arrow")
    pyarrow = optional("pyarrow", "data")
    try:
        with _source(path) as source:
            is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
            source.seek(0)
            reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
            name = _column_of(reader.schema, field, path)
            batches = (
                (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else iter(reader)
            )
            yield from _texts_of(batches, name, field, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, "Arrow", error) from None


def _source(path: Path) -> Any:
    """The file for pyarrow, whose name need not be text; not mapped: what is cut meanwhile would end the process."""
    return optional("pyarrow", "data").OSFile(os.fsencode(path))


class _Column(Protocol):
    """The part of pyarrow's arrays that is used here."""

    type: Any

    def to_pylist(self) -> list[object]: ...

    def cast(self, target_type: Any) -> _Column: ...


class _RecordBatch(Protocol):
    def column(self, name: str) -> _Column: ...


def _texts_of(batches: Iterable[_RecordBatch], name: str, field: str, path: Path) -> Texts:
    values = (value for batch in batches for value in _values(batch.column(name), field, path))
    for number, value in enumerate(values, 1):
        yield text_of({name: value}, field, f"{path}, row {number}", is_first=number == 1)


def _values(column: _Column, field: str, path: Path) -> list[object]:
    """The values of a column, which may hold bytes that are not UTF-8 where a writer says that there is text."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        if column.type.num_fields:
            raise DataError(
                f"{path}: {field!r} holds text that is not UTF-8. Write it again as UTF-8."
            ) from None
        binary = column.cast(optional("pyarrow", "data").large_binary())
        return [_decoded(raw) if isinstance(raw, bytes) else raw for raw in binary.to_pylist()]
    except (OverflowError, ValueError) as error:  # a date beyond Python's, an object with a name twice
        raise DataError(
            f"{path}: {field!r}, or what is beside it, cannot be read ({error}). Write the text in a "
            "column of its own."
        ) from None


def _columns_of(path: Path, module: str, kind: str) -> Any:
    """The module that reads them. Raises `DataError` for a file that is compressed as a whole."""
    found = optional(module, "data")
    if is_compressed(path):
        raise DataError(f"{path} is a compressed {kind} file. Decompress it first.")
    return found


def _column_of(schema: Any, field: str, path: Path) -> str:
    """The column that `field` is or lies in. Raises `DataError`."""
    name = first_of(schema.names, field)
    if name is None:
        raise DataError(f"{path} has no column {field!r}. {choice(schema.names)}")
    if schema.names.count(name) > 1:
        raise DataError(f"{path} has the column {name!r} twice. Write it again with one of them.")
    return name


def _damaged(path: Path, kind: str, error: Exception) -> DataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
    return DataError(f"{path} is not a readable {kind} file ({reason}). Fetch it again, or leave it out.")
