"""Documents, the same for every volunteer: how long at most and whether held out; a corpus of them.

Both follow from a document's text alone. So all volunteers agree on what nobody trains on without knowing each
other's files, and copies of a document, in one file or in many, are on the same side.

A corpus is streamed from the Hub, or kept on disk: the text of all documents once more, and where each of them is.
That store (store.py) is made once from the files that --data names, in one pass that holds no more than a document in
memory. Its documents are in the order of their hashes, the held-out ones first, so neither the names nor the
format of the files matter. Each epoch reads them in a random order that is computed, not kept.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from node.data.hub import Document, HubStream
from node.data.shelf import Shelf
from node.data.sources import documents_in, places_of
from node.data.store import DamagedStore
from protocol.errors import DataError
from protocol.windows import window

logger = logging.getLogger(__name__)

HASHES = 2**64
BUFFER = 10_000  # examples shuffled among each other; the order of the dataset's files is random, too
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
    """The documents of a store, which is made again when one is read that is damaged. Mutable: the open store."""

    def __init__(self, shelf: Shelf, split: Split) -> None:
        self._shelf = shelf
        self._store = shelf.open()
        try:
            self._held_out = self._store.below(split.bound)
        except DamagedStore:
            self._store = shelf.open_again(self._store, 0)
            self._held_out = self._store.below(split.bound)
        self.identity = self._store.identity

    @window
    def __repr__(self) -> str:
        return f"Documents: {len(self._store):,}, {self._held_out:,} held out | {self._store!r}"

    def training(self, seed: tuple[object, ...], epoch: int, first: int) -> Iterator[str]:
        count = len(self._store) - self._held_out
        order = DocumentOrder(count, (*seed, epoch))
        return (self._read(self._held_out + order[place]) for place in range(first, count))

    def held_out(self) -> Iterator[str]:
        return (self._read(number) for number in range(self._held_out))

    def _read(self, number: int) -> str:
        with self._shelf.told():
            try:
                return self._store.read(number).decode("utf-8")
            except (DamagedStore, OSError):
                self._store = self._shelf.open_again(self._store, number)
                return self._store.read(number).decode("utf-8")


def stored_documents(
    entries: Sequence[str],
    field: str,
    longest: int,
    split: Split,
    cache: Path,
    setting: str = "--data-cache",
    most: str = "",
) -> StoredDocuments:
    """The documents of what --data names, from the store in `cache`, which is made when there is none yet.

    `setting` and `most` are as of `Shelf`. Documents are cut at `longest` bytes. Raises `DataError` with what to do;
    then no store is left behind.
    """
    places = tuple(places_of(entries))
    if any(place.resolve().is_relative_to(cache.resolve()) for place in places):
        raise DataError(
            f"The prepared documents in {cache} lie in what --data names. Choose another {setting}."
        )
    read = partial(_hashed, places, field, longest)
    return StoredDocuments(Shelf(places, field, longest, cache, read, setting, most), split)


def _hashed(places: Sequence[Path], field: str, longest: int) -> Iterator[tuple[int, bytes]]:
    """All documents of `places`, cut, each with its hash; how far it is is logged now and then."""
    count, nbytes, told = 0, 0, time.monotonic()
    for document in documents_in(places, field):
        for piece in cut(document, longest):
            count, nbytes = count + 1, nbytes + len(piece)
            yield content_hash(piece), piece
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            logger.info("Reading the data: %s documents, %.1f GB so far.", f"{count:,}", nbytes / 1e9)


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
