"""What a document is to every volunteer alike: how long at most, and whether it is held out.

Both follow from a document's text alone. So all volunteers agree on what nobody trains on without knowing each
other's files, and copies of a document, in one file or in many, are on the same side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

HASHES = 2**64


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
