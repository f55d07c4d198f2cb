"""The store of documents on disk: their text, one after another, and an index of them, both with checksums.

The index has 24 bytes for each document, in the order of their hashes. A document is checked as it is read, the whole
index when the store is opened. Both are read, never mapped: a file that is cut while it is mapped kills the process.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
import stat
import struct
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from protocol.errors import NolocoError
from protocol.files.keeping import small_json
from protocol.windows import amount, window

FORMAT = 3  # a store of another one is made again
TEXT, INDEX, MARK = "text.bin", "index.bin", "store.json"
_NEW_MARK = "store.json.new"
FILES = (TEXT, INDEX, _NEW_MARK, MARK)  # a store is removed in this order: its rest is known by its mark
MADE_BY = "noloco documents"
_ROW = struct.Struct(
    "<QQII"
)  # a document's hash, its start, its bytes, and the checksum of these and its text
_PLACE = struct.Struct("<QQI")  # a row without the checksum
_ROWS = np.dtype([("hash", "<u8"), ("start", "<u8"), ("length", "<u4"), ("check", "<u4")])
_ROWS_AT_ONCE = 2**18


class DamagedStore(NolocoError):
    """A store in which something is missing or has changed; the text is for programmers."""


@dataclass(frozen=True)
class Mark:
    """What a store says of itself: `facts` and `contents` name the files that it was made of.

    A store that is not whole yet has no documents.
    """

    facts: str
    contents: str
    documents: int = 0
    text: int = 0  # bytes
    index: int = 0  # the checksum of it

    def write(self, directory: Path) -> None:
        with (directory / _NEW_MARK).open("wb") as file:
            file.write(json.dumps({"made_by": MADE_BY, "format": FORMAT, **asdict(self)}).encode())
            _flush(file)
        (directory / _NEW_MARK).replace(directory / MARK)

    @classmethod
    def of(cls, directory: Path) -> Mark | None:
        """Read a store's mark; None where there is none that this version has written."""
        found = small_json(directory / MARK)
        if (
            not isinstance(found, dict)
            or found.pop("made_by", "") != MADE_BY
            or found.pop("format", 0) != FORMAT
        ):
            return None
        kinds = {"facts": str, "contents": str, "documents": int, "text": int, "index": int}
        if {name: type(value) for name, value in found.items()} != kinds:
            return None
        return cls(**found)


class Store:
    """An open store. Raises `DamagedStore` and `OSError`, when it is opened and when it is read.

    It stays readable when its directory is removed, and others see by its lock that it is in use.
    """

    def __init__(self, directory: Path, longest: int) -> None:
        mark = Mark.of(directory)
        if mark is None or mark.documents < 1:
            raise DamagedStore(f"{directory} has no {MARK} of a store that is whole.")
        self.mark = mark
        self._directory = directory
        self._longest = longest
        self._text = self._opened(TEXT)
        self._index = self._opened(INDEX)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._text, fcntl.LOCK_SH)
        if (
            os.fstat(self._text).st_size != mark.text
            or os.fstat(self._index).st_size != mark.documents * _ROW.size
        ):
            raise DamagedStore(f"{directory} has files of another size than when they were made.")
        self.identity = self._checked_identity()

    def __len__(self) -> int:
        return self.mark.documents

    @window
    def __repr__(self) -> str:
        return f"Index: {amount(len(self) * _ROW.size)} | Text: {amount(self.mark.text)}"

    def read(self, number: int) -> bytes:
        """The text of a document."""
        row = self._row(number)
        _, start, length, check = row
        is_within = length <= self._longest and start + length <= self.mark.text
        text = os.pread(self._text, length, start) if is_within else b""
        if check != _checksum(*row[:3], text):
            raise DamagedStore(f"{self._directory} has a document that is not as it was written.")
        return text

    def below(self, bound: int) -> int:
        """The number of documents whose hash is below `bound`; they are the first ones."""
        return bisect_left(range(len(self)), bound, key=lambda number: self._row(number)[0])

    def _row(self, number: int) -> tuple[int, int, int, int]:
        found = os.pread(self._index, _ROW.size, number * _ROW.size)
        if len(found) != _ROW.size:
            raise DamagedStore(f"{self._directory} has an index that was cut.")
        return _ROW.unpack(found)

    def _checked_identity(self) -> str:
        """A name for these documents, which is that of the same ones in any store."""
        check, hashes = 0, hashlib.sha256()
        for block in self._index_blocks():
            check = zlib.crc32(block, check)
            hashes.update(np.frombuffer(block, _ROWS)["hash"].tobytes())
        if check != self.mark.index:
            raise DamagedStore(f"{self._directory} has an index that is not as it was written.")
        return hashes.hexdigest()

    def _index_blocks(self) -> Iterator[bytes]:
        for first in range(0, len(self), _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, len(self) - first)
            block = os.pread(self._index, count * _ROW.size, first * _ROW.size)
            if len(block) != count * _ROW.size:
                raise DamagedStore(f"{self._directory} has an index that was cut.")
            yield block

    def _opened(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._directory / name, flags)
        weakref.finalize(self, os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedStore(f"{self._directory} has a {name} that is not a file.")
        return descriptor


def write_store(directory: Path, documents: Iterable[tuple[int, bytes]], mark: Mark) -> int:
    """Write documents, each with its hash, into a directory without a store, and return their number.

    Raises `OSError`. Without a document no store is made; what was begun is the caller's to remove.
    """
    directory.mkdir(exist_ok=True)
    mark.write(directory)  # what a killed process leaves is known by it
    hashes, starts, lengths, checks = array.array("Q"), array.array("Q"), array.array("I"), array.array("I")
    end = 0
    with (directory / TEXT).open("wb") as text:
        for number, document in documents:
            text.write(document)
            hashes.append(number)
            starts.append(end)
            lengths.append(len(document))
            checks.append(_checksum(number, end, len(document), document))
            end += len(document)
        _flush(text)
    if not hashes:
        return 0
    index = _index_of(hashes, starts, lengths, checks)
    with (directory / INDEX).open("wb") as file:
        file.write(index.data)
        _flush(file)
    Mark(mark.facts, mark.contents, len(index), end, zlib.crc32(index.data)).write(directory)
    return len(index)


def _index_of(*columns: array.array[int]) -> NDArray[np.void]:
    index = np.empty(len(columns[0]), _ROWS)
    order = np.argsort(np.frombuffer(columns[0], np.uint64), kind="stable")
    for name, column in zip(_ROWS.names or (), columns, strict=True):
        index[name] = np.frombuffer(column, column.typecode)[order]
    return index


def _checksum(number: int, start: int, length: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(_PLACE.pack(number, start, length)))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
