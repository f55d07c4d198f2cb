"""What a document is to every volunteer alike: how long at most, and whether it is held out.

Both follow from a document's text alone. So all volunteers agree on what nobody trains on without knowing each
other's files, and copies of a document, in one file or in many, are on the same side. Documents are kept by
`node.data.store`, or streamed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from node.data.datasets_library import HubStream

HASHES = 2**64
BUFFER = (
    10_000  # examples that are shuffled among each other; the order of the dataset's files is random, too
)


class Documents(Protocol):
    """A corpus as documents."""

    @property
    def identity(self) -> str:
        """The same for the same documents, however they are stored."""

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


def identity_of(hashes: NDArray[np.uint64]) -> str:
    """Of a corpus, from the hashes of all its documents in ascending order."""
    return hashlib.sha256(hashes.astype("<u8").tobytes()).hexdigest()


class StreamedDocuments:
    """Read from the Hub while it is trained on: nothing is kept on disk, and nothing is counted.

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
        texts = self._stream.texts(int.from_bytes(digest[:4], "little"), self._buffer)
        return islice(self._documents(texts, held_out=False), first, None)

    def held_out(self) -> Iterator[str]:
        return self._documents(self._stream.texts(), held_out=True)

    def _documents(self, texts: Iterator[str | None], *, held_out: bool) -> Iterator[str]:
        for text in texts:
            for piece in cut((text.encode("utf-8", errors="replace"),), self._longest) if text else ():
                if self._split.holds_out(piece) == held_out:
                    yield piece.decode("utf-8")
