"""The bytes of a file, decompressed where it is compressed: its first bytes say so, whatever its name ends in."""

from __future__ import annotations

import bz2
import io
import logging
import lzma
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

from node.data.conversion import BZIP2, GZIP, XZ, ZSTD
from node.machine.limits import optional
from node.machine.named import quoted
from protocol.errors import DataError, UserError

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**20
_BOM = "\ufeff".encode()
ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")


def plain_name(path: Path) -> str:
    """The file's name in lower case, without the ending of a compression."""
    name = path.name.lower()
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def opened(path: Path) -> io.BufferedReader:
    """The file's bytes to read from, decompressed. Reading raises `DataError` with what to do."""
    return io.BufferedReader(_Blocks(_blocks(path)), BLOCK_BYTES)


def is_compressed(path: Path) -> bool:
    return start_of(path).startswith((GZIP, BZIP2, XZ, ZSTD))


def without_mark(head: bytes) -> bytes:
    """A text's first bytes without a byte order mark, which Windows' editors write."""
    return head.removeprefix(_BOM)


class _Blocks(io.RawIOBase):
    """Blocks as a file. Mutable: what is left of the last block."""

    def __init__(self, blocks: Generator[bytes, None, None]) -> None:
        self._left = memoryview(b"")
        self._blocks = blocks

    def close(self) -> None:
        self._blocks.close()  # which closes the file
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        if not self._left:
            self._left = memoryview(next(self._blocks, b""))
        count = min(len(into), len(self._left))
        into[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def start_of(path: Path) -> bytes:
    """Return the file's first bytes as they are stored. Raises `DataError`."""
    try:
        with path.open("rb") as file:
            return file.read(len(XZ))
    except OSError as error:
        raise unreadable(path, error) from None


def _blocks(path: Path) -> Generator[bytes, None, None]:
    start = start_of(path)
    try:
        if start.startswith(GZIP):
            yield from _gunzipped(path)
        elif start.startswith(ZSTD):
            yield from _unzstd(path)
        else:
            opener = bz2.open if start.startswith(BZIP2) else lzma.open if start.startswith(XZ) else open
            with opener(path, "rb") as file:
                yield from _read(file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise unreadable(path, error) from None


def _read(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _gunzipped(path: Path) -> Iterator[bytes]:
    """Yield all members of the file. Like gunzip, pass over zeros after them, and warn of anything else there."""
    with path.open("rb") as file:
        rest = file.read(BLOCK_BYTES)
        while rest:
            if not rest.startswith(GZIP):
                logger.warning("%s has bytes after the end of its gzip; they were left out.", path)
                return
            rest = yield from _member(file, rest)
            while not rest.strip(b"\0") and (more := file.read(BLOCK_BYTES)):
                rest = more
            rest = rest.lstrip(b"\0")
            rest += file.read(1) if len(rest) == 1 else b""


def _member(file: IO[bytes], rest: bytes) -> Generator[bytes, None, bytes]:
    """Yield what the gzip member that begins with `rest` holds. Returns what was read of the file after it."""
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    while not inflate.eof:
        block = inflate.decompress(rest, BLOCK_BYTES)
        if block:
            yield block
        rest = inflate.unconsumed_tail
        if not inflate.eof and not rest and not block and not (rest := file.read(BLOCK_BYTES)):
            raise EOFError("it is cut short: the end of the gzip is missing")
    return inflate.unused_data


def _unzstd(path: Path) -> Iterator[bytes]:
    try:
        pyarrow = optional("pyarrow", "data")
    except UserError as error:
        raise DataError(
            f"{path} is compressed with zstd. Decompress it: zstd -d {quoted(path)}. {error}"
        ) from None
    with pyarrow.input_stream(str(path), compression="zstd") as file:
        yield from _read(file)


def unreadable(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(f"Cannot read {path} ({reason}). Check the file and its permissions.")
