"""Documents from what --data names: files of text or rows, globs, folders, and the Hub.

A document is an iterable of blocks of its UTF-8 bytes, so that a text file larger than memory is one, too. A
text file is one document; a line, a row or an example is one, and an empty one is passed over.

A file is read in the same way however it is named, by itself, by a glob or by its folder. It passes through these, in
this order:

- opening.py: the data of a node, from its settings; documents.py and batches.py take it from there
- sources.py, folders.py: which files an entry names, and of a folder which of them are meant
- contents.py: their bytes, decompressed
- beginnings.py, conversion.py: what is no text or is in another encoding, refused with what makes text of it
- rows.py, fields.py: the text of each row; hub.py: the same by Hugging Face's library, which also tells splits
- doubts.py: what is read all the same, with a warning
- documents.py: texts cut into documents; shelf.py, store.py: those on disk
- tokenizer.py, tokenizer_files.py, text_alone.py: their tokens; batches.py, prefetch.py: sequences of them
"""

from __future__ import annotations

import codecs
import errno
import glob
import hashlib
import itertools
import logging
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from node.data.beginnings import markup_in
from node.data.contents import BLOCK_BYTES, opened, plain_name, start_of, without_mark
from node.data.conversion import (
    has_controls,
    has_nul,
    is_controls,
    not_utf8,
    require_known,
    require_text,
)
from node.data.doubts import Doubts
from node.data.folders import (
    is_beside_rows,
    nothing_in,
    options_for,
    require_no_other,
    shown_in,
    way_out,
)
from node.data.hub import Document, HubStream, opened_dataset, reason, texts_in, train_of
from node.data.rows import (
    ARROW,
    CSV_ENDINGS,
    JSON_ENDINGS,
    PARQUET,
    arrow_texts,
    begins_with_header,
    begins_with_row,
    csv_texts,
    json_texts,
    parquet_texts,
)
from node.machine.home import at_home
from node.machine.limits import optional
from node.machine.named import HUB, require_no_address, require_text_name
from protocol.errors import DataError

logger = logging.getLogger(__name__)


PYTHON_STDLIB = "python-stdlib"
DEFAULT_FIELD = "text"  # where JSON lines and the like have the text
_LEFT_OUT = {"test", "tests", "site-packages", "__pycache__"}
_PARQUET, _ARROW = ".parquet", ".arrow"
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves at the top of its directory
_ROWS = (_PARQUET, _ARROW, *JSON_ENDINGS, *CSV_ENDINGS)
_TEXT = ".txt"
_SPLIT = re.compile(  # words by which the Hub's layout tells splits
    r"(?<![a-z0-9])(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z0-9])"
)


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
    with _reading(entry):
        found = python_stdlib_files() if entry == PYTHON_STDLIB else _find(at_home(entry))
        files = [path for path in found if path.stat().st_size]
        for path in files:
            if not os.access(path, os.R_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return files


@contextmanager
def _reading(entry: str) -> Iterator[None]:
    """Turn errors into a `DataError` that says what went wrong, and in which file or folder of what `entry` names."""
    try:
        yield
    except (OSError, ValueError) as error:  # as of a NUL in the path
        reason = getattr(error, "strerror", None) or error
        place = getattr(error, "filename", None) or entry
        raise DataError(
            f"Cannot read {str(place)!r} ({reason}). Check the path and its permissions."
        ) from error


def _find(path: Path) -> list[Path]:
    if path.is_dir():
        raise nothing_in(path, [found for found in files_under(path) if found.is_file()])
    if path.exists() or not glob.has_magic(str(path)):
        if not (facts := path.stat()).st_size:
            if not stat.S_ISREG(facts.st_mode):
                raise DataError(
                    f"{path} is a pipe or a device, and data is read more than once. Write it to a file, "
                    "and name that."
                )
            raise DataError(f"{path} is empty. Name a file with text in it, or leave it out.")
        return [path]
    _require_open(path)
    names = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
    files = [found for found in sorted(map(Path, names)) if not found.is_dir()]
    if not files:
        named = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        os.scandir(Path(*named)).close()  # says why where that cannot be read, of which glob is silent
        raise DataError(f"No file matches {path}. Check the pattern and the current folder, {Path.cwd()}.")
    return files


def _require_open(pattern: Path) -> None:
    """Raise `OSError` for a folder that the pattern goes into and may not: glob passes over it without a word."""
    parts = (*pattern.parts, "*") if pattern.name == "**" else pattern.parts
    for number, part in enumerate(parts):
        for found in glob.iglob(str(Path(*parts[:number])), recursive=True):  # noqa: PTH207
            if not Path(found).is_dir():
                continue
            if glob.has_magic(part):
                os.scandir(found).close()
            else:
                os.stat(os.path.join(found, os.curdir))  # noqa: PTH116, PTH118 - Path leaves out the dot


def hub_name(entries: Sequence[str]) -> str | None:
    """The dataset of the Hub that the entries name; None for files. Raises `DataError` for one beside others."""
    if not any(entry.startswith(HUB) for entry in entries):
        return None
    if len(entries) > 1:
        raise DataError(f"A dataset of the Hub cannot be read beside others: give --data {HUB}NAME alone.")
    return entries[0].removeprefix(HUB)


def documents_of(entries: Sequence[str], field: str) -> Iterator[Document]:
    """The documents of all that the entries name, files or a dataset of the Hub. Raises `DataError`."""
    name = hub_name(entries)
    return documents_in(places_of(entries), field) if name is None else HubStream(name, field).documents()


def places_of(entries: Sequence[str]) -> list[Path]:
    """The files and dataset directories that the entries name, each once. Raises `DataError`."""
    places: dict[str, Path] = {}
    for entry in entries:
        if not entry.strip():
            raise DataError(
                "An empty name was given for the text, as by a variable that is not set. Name files."
            )
        require_no_address(entry, DataError)
        path = at_home(entry)
        with _reading(entry):
            if path.is_dir():
                require_no_other(path)
            is_dataset = is_dataset_directory(path)
        for place in [path] if is_dataset else files_of(entry):
            places.setdefault(os.path.realpath(place), place)
    return list(places.values())


def documents_in(places: Iterable[Path], field: str) -> Iterator[Document]:
    """The documents of files and dataset directories in their order; `field` holds the text where there are fields.

    Rows that are not UTF-8 are mended, and told of once. Raises `DataError` that names file, line and what to do.
    """
    doubts = Doubts()
    try:
        for place in places:
            with _reading(str(place)):
                files = _dataset_files(place) if place.is_dir() and not _is_saved(place) else [place]
            for file in files:
                try:
                    yield from _documents_of(file, field, doubts)
                except DataError as error:
                    if file != place:
                        with _reading(str(place)):
                            way = way_out(place, file, filter(Path.is_file, files_under(place)))
                        error.args = (f"{error}{way}",)
                    raise
    finally:
        doubts.warn()


def _documents_of(place: Path, field: str, doubts: Doubts) -> Iterator[Document]:
    rows = _rows_of(place, field)
    if rows is None:
        with opened(place) as file:
            if what := markup_in(file.peek()):
                doubts.marked_up(place, what)
        yield _text_blocks(place)
        return
    doubts.next_file()
    for number, text in enumerate(rows, 1):
        if text:
            yield (without_mark(doubts.mended(text, place, number)),)
            doubts.require_utf8(place, is_over=False)
    doubts.require_utf8(place, is_over=True)


def _rows_of(place: Path, field: str) -> Iterator[str | None] | None:
    """The texts of a file or directory that has rows, which its first bytes or its name say; None for other text."""
    if place.is_dir():
        return texts_in(opened_dataset(str(place), str(place), is_saved=True), field, str(place))
    with opened(place) as file:
        head = file.peek()
    name = plain_name(place)
    start = start_of(place)
    is_rows = head.startswith((PARQUET, *ARROW))
    if not is_rows:
        require_known(place, head, start)
    if name.endswith(_ROWS) and (what := markup_in(head)):
        raise DataError(f"{place} is {what}, as servers send in place of a file. Fetch it again.")
    if head.startswith(PARQUET) or (name.endswith(_PARQUET) and not is_rows):
        return parquet_texts(place, field)
    if is_rows or name.endswith(_ARROW):
        return arrow_texts(place, field)
    require_text(place, head, start)
    if name.endswith(CSV_ENDINGS):
        return csv_texts(place, field)
    if not name.endswith(JSON_ENDINGS) and begins_with_header(without_mark(head), field):
        return csv_texts(place, field)
    is_json = name.endswith(JSON_ENDINGS) or begins_with_row(without_mark(head), field)
    return json_texts(place, field) if is_json else None


def _text_blocks(path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, block, is_utf8 = 0, b"", False
    try:
        with opened(path) as file:
            while block := file.read(BLOCK_BYTES):
                if b"\0" in block:
                    raise has_nul(path)
                if not done and is_controls(block):
                    raise has_controls(path)
                decoder.decode(block)
                yield block if done else without_mark(block)
                done += len(block)
                is_utf8 = is_utf8 or not block.isascii()
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        around = block[max(0, error.start - BLOCK_BYTES // 512) :]
        is_utf8 = is_utf8 or not block[: error.start].isascii()
        raise not_utf8(path, done + error.start, around, start_of(path), is_utf8) from None


def is_dataset_directory(path: Path) -> bool:
    """Return whether there is anything in a directory that is read: files with rows, or text."""
    return path.is_dir() and (_is_saved(path) or any(_found_in(path)))


def _found_in(directory: Path) -> Iterator[Path]:
    """Yield the files with rows or text in a directory and its folders, compressed or not; none that are hidden."""
    for found in files_under(directory):
        if _is_read(found) and not is_beside_rows(found) and stat.S_ISREG(found.stat().st_mode):
            yield found


def facts_of(place: Path) -> list[tuple[str, int, int]]:
    """(path, bytes, nanoseconds of the last change, its times included) of a file, or of all in a folder.

    Raises `DataError`.
    """
    with _reading(str(place)):
        files = sorted(files_under(place)) if place.is_dir() else [place]
        found = [
            (file, file.stat() if file.exists() else file.lstat()) for file in files
        ]  # a link to nothing
        return [(str(file.resolve()), facts.st_size, facts.st_ctime_ns) for file, facts in found]


def contents_of(place: Path) -> list[tuple[str, int, str | int]]:
    """(path, bytes, digest) of each file that is read, so that one that was touched is known again.

    The nanoseconds of the last change stand for the digest of others in a folder. Raises `DataError`.
    """
    with _reading(str(place)):
        is_folder, is_saved = place.is_dir(), _is_saved(place)
        facts = [(Path(name), nbytes, changed) for name, nbytes, changed in facts_of(place)]
        return [
            (
                str(file),
                nbytes,
                changed if is_folder and not (is_saved or _is_read(file)) else _digest_of(file),
            )
            for file, nbytes, changed in facts
        ]


def _is_read(file: Path) -> bool:
    return plain_name(file).endswith((*_ROWS, _TEXT))


def _digest_of(file: Path) -> str:
    if not file.is_file():  # a link to nothing, a pipe
        return ""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, hashlib.blake2b).hexdigest()


def files_under(directory: Path) -> Iterator[Path]:
    """Yield what a directory and its folders hold, as the system lists it, except hidden things and the folders.

    Raises `OSError` for a folder that cannot be read: what is in it would be left out without a word.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(directory, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _dataset_files(directory: Path) -> list[Path]:
    """The files to train on: those of the split "train" in the Hub's layout; or all with rows; or all .txt files."""
    found = sorted(_found_in(directory))
    rows = [file for file in found if plain_name(file).endswith(_ROWS)]
    texts = [file for file in found if plain_name(file).endswith(_TEXT) and file.stat().st_size]
    if not rows:
        return texts
    if texts:
        logger.warning(
            "%s has files with rows, and so its %s files without are left out, as %s. If they are to be trained on, "
            "name them, too: %s.",
            directory, f"{len(texts):,}", texts[0].name, options_for(directory, texts),
        )  # fmt: skip
    names = [row.relative_to(directory).as_posix().lower() for row in rows]
    if not (directory / "README.md").exists() and not any(map(_SPLIT.search, names)):
        return rows
    split = _files_of_split(directory)
    read = {os.path.realpath(file) for file in split}
    left_out = [row for row in rows if os.path.realpath(row) not in read]
    if left_out:
        logger.warning(
            "%s is read as a dataset in splits, by the names of its files or its README.md: %s files are read, "
            "as %s, and %s are left out, as %s. If these are to be trained on, too, name all of them: %s.",
            directory, f"{len(split):,}", shown_in(directory, split), f"{len(left_out):,}",
            shown_in(directory, left_out), options_for(directory, rows),
        )  # fmt: skip
    return split


def _files_of_split(directory: Path) -> list[Path]:
    """Files by split as Hugging Face's library assigns them, by their names or by what README.md says."""
    require_text_name(directory, DataError)
    datasets = optional("datasets", "data")
    try:
        files = datasets.load_dataset_builder(str(directory)).config.data_files
    except Exception as error:  # noqa: BLE001  the library raises a dozen kinds, and others with each version
        raise DataError(
            f"Cannot read the dataset {str(directory)!r} ({reason(error)}). Check what README.md says of its files, "
            "or name the files themselves with --data."
        ) from None
    return [Path(file) for file in train_of(files or {}, str(directory), "Name its files with --data.")]


def _is_saved(directory: Path) -> bool:
    return any((directory / name).exists() for name in _SAVED)
