"""Documents from what --data names: text files, globs, JSON lines, parquet, dataset directories, and the Hub.

A document is an iterable of blocks of its UTF-8 bytes, so that a text file larger than memory is one, too. A
text file is one document; a line, a row or an example is one, and an empty one is passed over.

Datasets are read by Hugging Face's library. No code of a dataset is run: the library reads data files only (its
loading scripts are gone since version 4).
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from node.machine.limits import optional
from protocol.errors import DataError

Document: TypeAlias = Iterable[bytes]

PYTHON_STDLIB = "python-stdlib"
DEFAULT_FIELD = "text"  # where JSON lines and the like have the text
_LEFT_OUT = {"test", "tests", "site-packages", "__pycache__"}
_BLOCK_BYTES = 2**20
_LONGEST_LINE = 2**26  # bytes of a JSON line: more is no document but a mistake
_ROWS_AT_ONCE = 256
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_PARQUET = ".parquet"
HUB = "hub:"  # before the name of something on the Hugging Face Hub
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves at the top of its directory
_DATA_FILES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".gz", ".zst")
_WANTED_SPLIT = "train"


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
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"Cannot read {entry!r} ({reason}). Check the path and its permissions.") from error


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
        dataset = _opened(str(place), str(place), is_saved=_is_saved(place))
        texts: Iterable[str | None] = _texts(dataset, field, str(place))
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
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                if not line.isspace():
                    yield _field_of_line(line, field, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _field_of_line(line: bytes, field: str, where: str) -> str | None:
    if len(line) >= _LONGEST_LINE:
        raise DataError(f"{where} is longer than {_LONGEST_LINE >> 20} MiB. Is this JSON lines? Split it.")
    try:
        contents = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where} is not JSON ({str(error)[:80]}). Correct or delete this line; each line must be one object."
        ) from None
    if not isinstance(contents, dict):
        raise DataError(f"{where} is not a JSON object. Each line must be one, with text in field {field!r}.")
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


def is_dataset_directory(path: Path) -> bool:
    """Whether the library would find examples here. Folders of plain text are none: it would take lines for texts."""
    if not path.is_dir():
        return False
    return _is_saved(path) or any(
        found.name.endswith(_DATA_FILES) for found in path.rglob("*") if not found.name.startswith(".")
    )


def _is_saved(directory: Path) -> bool:
    return any((directory / name).exists() for name in _SAVED)


class _Dataset(Protocol):
    """The part of the library's datasets that is used here."""

    def __iter__(self) -> Iterator[Mapping[str, object]]: ...

    def shuffle(self, *, seed: int, buffer_size: int) -> _Dataset: ...


class HubStream:
    """A dataset of the Hub, NAME or NAME:CONFIG or NAME:CONFIG:SPLIT, read from the network as it is needed.

    A directory in the Hub's layout may stand for the name.
    """

    def __init__(self, name: str, field: str) -> None:
        self.name = name
        self._field = field
        place, config, split, *_ = [*name.split(":"), "", ""]
        self._dataset = _opened(name, place, config or None, split or None)

    def texts(self, seed: int | None = None, buffer: int = 0) -> Iterator[str | None]:
        """The text of each example; with a seed in the order of the library's bounded shuffle.

        The same seed gives the same order each time.
        """
        dataset = self._dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=buffer)
        yield from _texts(dataset, self._field, self.name)


def _opened(
    name: str, place: str, config: str | None = None, split: str | None = None, *, is_saved: bool = False
) -> _Dataset:
    """The split to train on where there are several: "train", or the only one. Raises `DataError`."""
    datasets = optional("datasets", "data")  # not earlier: it takes a second, and most nodes need none of it
    try:
        if is_saved:
            opened = datasets.load_from_disk(place)
        else:
            opened = datasets.load_dataset(place, config, split=split, streaming=True)
    except Exception as error:  # noqa: BLE001  the library raises a dozen kinds, and others with each version
        raise DataError(
            f"Cannot read the dataset {name!r} ({_reason(error)}). Check its name (hub:NAME:CONFIG:SPLIT) and "
            "the connection, or name files on this machine with --data."
        ) from None
    splits = opened if isinstance(opened, Mapping) else {_WANTED_SPLIT: opened}
    found: _Dataset | None = splits.get(_WANTED_SPLIT)
    if found is None and len(splits) == 1:
        (found,) = splits.values()
    if found is None:
        raise DataError(
            f"The dataset {name!r} has no split 'train', but {', '.join(map(str, splits))}. "
            f"Name one: --data {HUB}{name}::SPLIT."
        )
    return found


def _texts(dataset: _Dataset, field: str, name: str) -> Iterator[str | None]:
    for example in _examples(dataset, name):
        if field not in example:
            raise DataError(f"The dataset {name!r} has no column {field!r}. {_choice(example)}")
        yield _checked(example[field], field, f"The dataset {name!r}")


def _examples(dataset: _Dataset, name: str) -> Iterator[Mapping[str, object]]:
    try:
        yield from dataset
    except Exception as error:  # noqa: BLE001  as above: damaged files, broken connections
        raise DataError(
            f"The dataset {name!r} broke off while it was read ({_reason(error)}). Check files and connection."
        ) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
