"""Documents from what --data names: text files, globs, JSON lines, parquet and local dataset directories.

A document is an iterable of blocks of its UTF-8 bytes, so that a text file larger than memory is one, too. A
text file is one document; a line, a row or an example is one, and an empty one is passed over.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from node.data.datasets_library import examples_of, is_dataset_directory
from node.machine.extras import optional
from protocol.errors import DataError

Document: TypeAlias = Iterable[bytes]

PYTHON_STDLIB = "python-stdlib"
DEFAULT_FIELD = "text"  # where JSON lines and the like have the text
_LEFT_OUT = {"test", "tests", "site-packages", "__pycache__"}
_BLOCK_BYTES = 2**20
_LONGEST_LINE = 2**26  # bytes of a JSON line: more is no document but a mistake
_ROWS_AT_ONCE = 256
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_PARQUET = (".parquet",)


def python_stdlib_files() -> list[Path]:
    """The running Python's own .py files without tests and installed packages, sorted by path.

    About 12.6 MB in 3.11. The files, and so the corpus, differ a little between versions and builds.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # os.walk descends into what is left
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=Path.as_posix)


def files_of(entry: str) -> list[Path]:
    """The files that one entry names, those of a glob sorted by path and without the empty ones.

    `**` recurses, ~ is the home folder. Raises `DataError` for what is missing, unreadable, or named and empty.
    """
    try:
        found = python_stdlib_files() if entry == PYTHON_STDLIB else _find(Path(entry).expanduser())
        return [path for path in found if path.stat().st_size]
    except (OSError, RuntimeError, ValueError) as error:  # as of an unknown ~user, or a NUL in the path
        raise DataError(f"Cannot read {entry!r} ({error}). Check the path and its permissions.") from error


def _find(path: Path) -> list[Path]:
    if path.is_dir():
        raise DataError(f"{path} is a folder. Name the files in it, for instance {path / '**' / '*.txt'}.")
    if path.exists() or not glob.has_magic(str(path)):
        if not path.stat().st_size:
            raise DataError(f"{path} is empty. Name a file with text in it, or leave it out.")
        return [path]
    names = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
    files = [found for found in sorted(map(Path, names)) if not found.is_dir()]
    if not files:
        raise DataError(f"No file matches {path}. Check the pattern and the current folder, {Path.cwd()}.")
    return files


def places_of(entries: Sequence[str]) -> list[Path]:
    """The files and dataset directories that the entries name, each once. Raises `DataError`."""
    places: dict[Path, None] = {}
    for entry in entries:
        path = Path(entry).expanduser()
        places |= dict.fromkeys([path] if is_dataset_directory(path) else files_of(entry))
    return list(places)


def documents_of(place: Path, field: str) -> Iterator[Document]:
    """The documents of a file or dataset directory in its order; `field` holds the text where there are fields.

    Raises `DataError` that names file, line and what to do.
    """
    name = place.name.lower()
    if place.is_dir():
        texts: Iterable[str | None] = examples_of(place, field)
    elif name.endswith(_LINES):
        texts = _json_lines(place, field)
    elif name.endswith(_PARQUET):
        texts = _parquet_rows(place, field)
    else:
        yield _text_blocks(place)
        return
    for text in texts:
        if text:
            yield (text.encode("utf-8", errors="replace"),)


def _text_blocks(path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if b"\0" in block:
                    raise DataError(f"{path} is binary: it has NUL bytes. Name text files only.")
                decoder.decode(block)
                done += len(block)
                yield block
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (near byte {done + error.start:,}). Name text files only, or convert it: "
            f"iconv -f LATIN1 -t UTF-8 {path.name}."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _json_lines(path: Path, field: str) -> Iterator[str | None]:
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(_lines(file), 1):
                if not line.isspace():
                    yield _field_of_line(line, field, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE):
        yield line


def _field_of_line(line: bytes, field: str, where: str) -> str | None:
    if len(line) >= _LONGEST_LINE:
        raise DataError(f"{where} is longer than {_LONGEST_LINE >> 20} MiB. Is this JSON lines? Cut it up.")
    try:
        contents = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where} is not JSON ({str(error)[:80]}). Mend or delete this line; each line must be one object."
        ) from None
    if not isinstance(contents, dict):
        raise DataError(
            f"{where} is not a JSON object. Each line must be one, with the text in field {field!r}."
        )
    if field not in contents:
        raise DataError(f"{where} has no field {field!r}. {_choice(contents)}")
    return _checked(contents[field], field, where)


def _parquet_rows(path: Path, field: str) -> Iterator[str | None]:
    pyarrow, parquet = optional("pyarrow", "data"), optional("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise DataError(f"{path} has no column {field!r}. {_choice(names)}")
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield _checked(text, field, str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file ({str(error).strip().splitlines()[0][:100]}). "
            "Fetch it again, or leave it out."
        ) from None


def _checked(value: object, field: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise DataError(
        f"{where}: {field!r} holds {type(value).__name__}, not text. "
        "Name the field that holds text with --text-field."
    )


def _choice(names: Iterable[str]) -> str:
    return f"Name the one that holds the text with --text-field: there is {', '.join(names) or 'none'}."[:300]


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"Cannot read {path} ({error}). Check the file and its permissions.")
