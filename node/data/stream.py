"""A corpus that is read from the Hub while it is trained on: nothing is kept on disk, and nothing is counted.

Documents come in the library's order of a bounded shuffle. A position is a number of examples: going on from one
reads again, without tokenising, what came before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice

from node.data.datasets_library import HubStream
from node.data.documents import Split, cut

BUFFER = (
    10_000  # examples that are shuffled among each other; the order of the dataset's files is random, too
)


class StreamedDocuments:
    """Every volunteer reads in an order of its own. The first `first` documents of an epoch are read again."""

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
