"""Documents, the same for every volunteer: how long at most and whether held out; a corpus of them.

Both follow from a document's text alone. So all volunteers agree on what nobody trains on without knowing each
other's files, and copies of a document, in one file or in many, are on the same side.

A corpus is streamed from the Hub, or kept on disk, memory-mapped: the text of all documents once more, and where each
of them is. That store is made once from the files that --data names, in one pass that holds no more than a document
in memory. Its documents are in the order of their hashes, the held-out ones first, so neither the names nor the
format of the files matter. Each epoch reads them in a random order that is computed, not kept.
"""

from __future__ import annotations

import array
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from node.data.hub import Document, HubStream
from node.data.sources import documents_in, facts_of, places_of
from protocol.errors import DataError
from protocol.keeping import advice_for, one_after_another
from protocol.places import require_folder, require_way
from protocol.windows import amount, window

logger = logging.getLogger(__name__)

HASHES = 2**64
BUFFER = 10_000  # examples shuffled among each other; the order of the dataset's files is random, too
_FORMAT = 2  # of the store; another one is made again
_TEXT, _INDEX = "text.bin", "index.npy"
_TELL_SECONDS = 10.0
_FEISTEL_ROUNDS = 6
_ODD = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio, as splitmix64 mixes with
_MASK = 2**64 - 1


class Documents(Protocol):
    """A corpus as documents."""

    @property
    def identity(self) -> str:
        """A name for these documents that is the same however they are stored."""

    def training(self, seed: tuple[object, ...], epoch: int, first: int) -> Iterator[str]:
        """The documents to train on in the order of (seed, epoch), from the `first` on: each of them once."""

    def held_out(self) -> Iterator[str]:
        """The others, always in the same order."""


@dataclass(frozen=True)
class Split:
    """`held_out` is a fraction of the documents."""

    held_out: float

    @property
    def bound(self) -> int:
        """Documents whose hash lies below are held out."""
        return int(self.held_out * HASHES)

    def holds_out(self, document: bytes) -> bool:
        return content_hash(document) < self.bound


def content_hash(document: bytes) -> int:
    """64 bits. Space around the text does not count: the same text with and without a last newline is the same."""
    return int.from_bytes(hashlib.blake2b(document.strip(), digest_size=8).digest(), "big")


def cut(blocks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """A document's UTF-8 in pieces of at most `longest` bytes, cut after the last line end that fits in.

    Where there is none, between two characters. Pieces of nothing but white space are left out. Holds a block and a
    piece in memory; how the text is cut does not depend on the blocks.
    """
    rest = b""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > longest:
            end = rest.rfind(b"\n", start, start + longest) + 1 or _before_character(rest, start + longest)
            yield from _unless_blank(rest[start:end])
            start = end
        rest = rest[start:]
    yield from _unless_blank(rest)


def _unless_blank(piece: bytes) -> Iterator[bytes]:
    if piece.strip():
        yield piece


def _before_character(text: bytes, end: int) -> int:
    """The last place up to `end` at which a character begins."""
    while text[end] & 0xC0 == 0x80:
        end -= 1
    return end


class StreamedDocuments:
    """Documents read from the Hub while they are trained on: nothing is kept on disk, and nothing is counted.

    Every volunteer reads in an order of its own, the library's bounded shuffle. A position is a number of documents:
    going on from one reads again, without tokenising, what came before it in the epoch.
    """

    def __init__(self, stream: HubStream, longest: int, split: Split, buffer: int = BUFFER) -> None:
        self._stream = stream
        self._longest = longest
        self._split = split
        self._buffer = buffer
        self.identity = hashlib.sha256(f"hub:{stream.name}".encode()).hexdigest()

    def training(self, seed: tuple[object, ...], epoch: int, first: int) -> Iterator[str]:
        digest = hashlib.sha256(repr((*seed, epoch)).encode()).digest()
        documents = self._stream.documents(int.from_bytes(digest[:4], "little"), self._buffer)
        return islice(self._pieces(documents, held_out=False), first, None)

    def held_out(self) -> Iterator[str]:
        return self._pieces(self._stream.documents(), held_out=True)

    def _pieces(self, documents: Iterator[Document], *, held_out: bool) -> Iterator[str]:
        for document in documents:
            for piece in cut(document, self._longest):
                if self._split.holds_out(piece) == held_out:
                    yield piece.decode("utf-8")


class StoredDocuments:
    """The documents of a store: `index` is uint64 [documents, 3], their hashes ascending, starts and ends."""

    def __init__(self, directory: Path, split: Split) -> None:
        self._index: NDArray[np.uint64] = np.load(directory / _INDEX, mmap_mode="r", allow_pickle=False)
        self._text: NDArray[np.uint8] = np.memmap(directory / _TEXT, np.uint8, mode="r")
        self._held_out = int(np.searchsorted(self._index[:, 0], np.uint64(split.bound)))
        self.identity = hashlib.sha256(self._index[:, 0].astype("<u8").tobytes()).hexdigest()

    @window
    def __repr__(self) -> str:
        documents = f"{len(self._index):,}, {self._held_out:,} held out"
        return f"Documents: {documents} | Index: {_place(self._index)} | Text: {_place(self._text)}"

    def training(self, seed: tuple[object, ...], epoch: int, first: int) -> Iterator[str]:
        count = len(self._index) - self._held_out
        order = DocumentOrder(count, (*seed, epoch))
        return (self._read(self._held_out + order[place]) for place in range(first, count))

    def held_out(self) -> Iterator[str]:
        return (self._read(number) for number in range(self._held_out))

    def _read(self, number: int) -> str:
        _, start, end = self._index[number].tolist()
        return bytes(self._text[start:end]).decode("utf-8")


def _place(array: NDArray[Any]) -> str:
    """Tell how large an array is, and whether it is read from its file as it is needed."""
    return f"{amount(array.nbytes)} {'mapped' if isinstance(array, np.memmap) else 'in memory'}"


def stored_documents(
    entries: Sequence[str], field: str, longest: int, split: Split, cache: Path, setting: str = "--data-cache"
) -> StoredDocuments:
    """The documents of what --data names, from the store in `cache`, which is made when there is none yet.

    `setting` is by what whoever reads an error puts the store elsewhere.

    Documents are cut at `longest` bytes. Raises `DataError` with what to do; then no store is left behind.
    Processes that want the same store at the same time wait for the first one's.
    """
    places = places_of(entries)
    directory = cache / _name(places, field, longest)
    try:
        require_way(cache)
        cache.mkdir(parents=True, exist_ok=True)
        for folder in (cache, directory):
            if folder.exists():
                require_folder(folder)
        with one_after_another(directory.with_suffix(".lock")):
            if not _is_whole(directory):
                _make(places, field, longest, directory)
        return StoredDocuments(directory, split)
    except OSError as error:
        advice = advice_for(error)
        raise DataError(
            f"Cannot keep the documents in {cache} ({error.strerror}). {advice}, or choose another {setting}."
        ) from None


def _name(places: Sequence[Path], field: str, longest: int) -> str:
    """A name derived from everything the store is made of: a changed file gives another name."""
    facts = [known for place in places for known in facts_of(place)]
    described = json.dumps([_FORMAT, field, longest, facts])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _is_whole(directory: Path) -> bool:
    """Return whether there is a store with nothing missing; a damaged one is warned of."""
    if not directory.exists():
        return False
    try:
        index = np.load(directory / _INDEX, mmap_mode="r", allow_pickle=False)
        if index.ndim == 2 and int(index[:, 2].max()) == (directory / _TEXT).stat().st_size:
            return True
    except (OSError, ValueError, EOFError, IndexError):
        pass
    logger.warning("The prepared documents in %s are damaged; they are made again.", directory)
    return False


def _make(places: Sequence[Path], field: str, longest: int, directory: Path) -> None:
    beside = directory.with_suffix(".new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        with (beside / _TEXT).open("wb") as text:
            hashes, ends = _write(places, field, longest, text)
        if not hashes:
            raise DataError(
                f"There is no text in {', '.join(map(str, places[:3])) or 'nothing'}. Name files with text in them."
            )
        np.save(beside / _INDEX, _index_of(hashes, ends), allow_pickle=False)
        shutil.rmtree(directory, ignore_errors=True)  # a damaged one
        beside.replace(directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(
    places: Sequence[Path], field: str, longest: int, text: IO[bytes]
) -> tuple[array.array[int], array.array[int]]:
    """Write all documents into `text`, one after another. Returns their hashes and where each ends."""
    hashes, ends = array.array("Q"), array.array("Q")
    end, told = 0, time.monotonic()
    for document in documents_in(places, field):
        for piece in cut(document, longest):
            text.write(piece)
            end += len(piece)
            hashes.append(content_hash(piece))
            ends.append(end)
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            logger.info("Reading the data: %s documents, %.1f GB so far.", f"{len(ends):,}", end / 1e9)
    return hashes, ends


def _index_of(hashes: array.array[int], ends: array.array[int]) -> NDArray[np.uint64]:
    ascending = np.frombuffer(hashes, np.uint64)
    stops = np.frombuffer(ends, np.uint64)
    starts = np.concatenate([np.zeros(1, np.uint64), stops[:-1]])
    by_hash = np.argsort(ascending, kind="stable")
    return np.stack([ascending[by_hash], starts[by_hash], stops[by_hash]], axis=1)


class DocumentOrder:
    """A permutation of the numbers below `count`, the same one for the same `seed`; it takes no memory.

    A Feistel network permutes the numbers below a power of four; what falls beyond the count is permuted again
    until it falls within (cycle walking, Black and Rogaway 2002). So an order may begin anywhere, at once.
    """

    def __init__(self, count: int, seed: tuple[object, ...]) -> None:
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        digest = hashlib.shake_256(repr(seed).encode()).digest(8 * _FEISTEL_ROUNDS)
        self._keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]

    def __getitem__(self, place: int) -> int:
        """The number at `place`; both are below the count."""
        if not 0 <= place < self._count:
            raise IndexError(place)
        place = self._permuted(place)
        while place >= self._count:  # the power is below 4 · count: four times on average at most
            place = self._permuted(place)
        return place

    def _permuted(self, number: int) -> int:
        low = (1 << self._half) - 1
        left, right = number >> self._half, number & low
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & low)
        return left << self._half | right


def _mixed(number: int, key: int) -> int:
    """64 bits that depend on all of both (the finaliser of splitmix64)."""
    mixed = (number * _ODD + key) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return mixed ^ mixed >> 31
