"""The line of microbatches that training draws from: endless, each with the position at which to go on after it.

Tokens of one document after another, each followed by the end of text, are cut evenly: sequences may begin and end
within documents and hold several. A sequence's labels are its inputs one token later, so the last label of one is the
first input of the next: every token is an input once, and none is lost.

Sequences are then shuffled among the others of a window of many documents. Without that, the sequences of a step are
neighbours in one document, and a step learns little more from ten of them than from one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from node.data.documents import DocumentOrder, Documents
from node.storage.position import Position
from protocol.errors import DataError, NothingHeldOut
from protocol.run.manifest import Data, Manifest
from protocol.windows import window

if TYPE_CHECKING:  # not when it runs: a look at a checkpoint's position does without tokenizers
    from node.data.tokenizer import Ids, Tokenizer

TOKENISED_AT_ONCE = 16  # documents: enough to occupy all cores, few enough that little is made in vain
WINDOWS_HELD = 2  # the one that is drawn from and the next one, which is filled meanwhile
SPREAD = 8  # of all held-out sequences read, one in so many is measured on where not all are asked for

Read: TypeAlias = Callable[[int, int], Iterator[str]]  # the documents of an epoch, from a number on
Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs and labels, int64 [sequences, tokens] each


@dataclass
class TokenisingTally:
    """Counts of what one line of batches has tokenised, and the time by `clock`; the thread that makes it writes."""

    clock: Callable[[], float] = time.perf_counter
    documents: int = 0
    nbytes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def rate(self) -> tuple[float, float]:
        """Bytes and tokens in a second of tokenising; zeros where it took no time that the clock could tell."""
        return (self.nbytes / self.seconds, self.tokens / self.seconds) if self.seconds else (0.0, 0.0)


class TrainingData:
    """Documents and a tokenizer: what a run trains and validates on.

    Nothing is tokenised before it is needed, and nothing of it is kept. `identity` is the same for the same text,
    wherever it is.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.identity = documents.identity

    @window
    def __repr__(self) -> str:
        return f"Identity: {self.identity[:8]}… | Tokenizer: {type(self.tokenizer).__name__} | {self.documents!r}"

    def require(self, tokens: int) -> None:
        """Check at start-up that there is a sequence of `tokens` to train on. Raises `DataError` when not."""
        some = self.documents.training((), 0, 0)
        if next(packed_once(some, self.tokenizer, tokens), None) is None:
            raise DataError(
                f"The data is too short to train on: sequences have {tokens} tokens, and all documents that are not "
                "held out have no more. Name more text with --data."
            )

    def batches(
        self,
        run_id: str,
        peer_id: str,
        manifest: Manifest,
        position: Position,
        tally: TokenisingTally | None = None,
    ) -> Iterator[tuple[Batch, Position]]:
        """Microbatches for ever, seeded by (run, peer), from `position` on, each with the position after it.

        What they cost is added to `tally`.
        """
        tally = tally or TokenisingTally()

        def read(epoch: int, first: int) -> Iterator[str]:
            return self.documents.training((run_id, peer_id), epoch, first)

        tokens, size = manifest.data.sequence_tokens, manifest.inner.sequences
        packed = sequences(read, self.tokenizer, tokens, replace(position, drawn=0), tally)
        line = shuffled(packed, position, (run_id, peer_id), window_sequences(manifest.data))
        while True:
            drawn = list(islice(line, size))
            yield batch_of([ids for ids, _ in drawn]), drawn[-1][1]

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield at most `limit` held-out sequences in batches of `sequences`, the same at every call.

        They are spread over `SPREAD` times as many, so that a few do not come from a document or two. The last batch
        may have fewer. Raises `NothingHeldOut` when there is no sequence.
        """
        batches = self._spread(self.documents.held_out(), tokens, sequences, limit)
        if (first := next(batches, None)) is None:
            raise NothingHeldOut(
                f"The held-out documents of the data have fewer than the {tokens + 1} tokens of a sequence."
            )
        yield first
        yield from batches

    def trained_batches(self, tokens: int, sequences: int, limit: int) -> Iterator[Batch]:
        """Batches of the documents that are trained on."""
        return self._spread(self.documents.training((), 0, 0), tokens, sequences, limit)

    def _spread(
        self, documents: Iterator[str], tokens: int, sequences: int, limit: int | None
    ) -> Iterator[Batch]:
        packed = packed_once(documents, self.tokenizer, tokens)
        if limit is not None:
            found = list(islice(packed, SPREAD * limit))
            packed = islice(found, 0, limit * (step := max(1, len(found) // limit)), step)
        while rows := list(islice(packed, sequences)):
            yield batch_of(rows)


# --- documents to sequences ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A document's tokens and end of text, and the position of the first of them."""

    ids: Ids
    position: Position


def sequences(
    read: Read, tokenizer: Tokenizer, tokens: int, position: Position, tally: TokenisingTally
) -> Iterator[tuple[Ids, Position]]:
    """Tokens [tokens + 1] of one sequence after another, each with the position of the next; for ever.

    Raises `DataError` when an epoch holds no document.
    """
    pieces = _pieces(read, tokenizer, replace(position, token=0), tally)
    held: deque[_Piece] = deque()
    skip, length = position.token, -position.token  # of the first piece held; of all held without that
    while True:
        while length <= tokens:
            held.append(next(pieces))
            length += len(held[-1].ids)
        ids = held[0].ids  # most sequences are within one document
        if len(ids) < skip + tokens + 1:
            ids = np.concatenate([piece.ids for piece in held])
        row = ids[skip : skip + tokens + 1]
        skip, length = skip + tokens, length - tokens
        while skip >= len(held[0].ids):
            skip -= len(held.popleft().ids)
        at = held[0].position
        yield row, Position(at.corpus, at.epoch, at.document, skip, at.drawn)


class _Window:
    """A window of at most `most` sequences in a row from `start` to `end`, which are shuffled among each other."""

    def __init__(self, start: Position, most: int) -> None:
        self.start = self.end = start
        self.count = 0
        self._most = most
        self._rows: Ids | None = (
            None  # [most, tokens + 1]; of memory that is not written to, the system gives none
        )

    def is_whole(self) -> bool:
        """True if the window is full or its epoch over: small corpora are not read many times over to fill one."""
        return self.count >= self._most or self.end.epoch > self.start.epoch

    def add(self, line: Iterator[tuple[Ids, Position]]) -> None:
        row, self.end = next(line)
        if self._rows is None:
            self._rows = np.empty((self._most, len(row)), np.int32)
        self._rows[self.count] = row
        self.count += 1

    def row(self, number: int) -> Ids:
        assert self._rows is not None
        row: Ids = self._rows[number]
        return row


def window_sequences(data: Data) -> int:
    """Return how many sequences are shuffled among each other."""
    return max(1, data.shuffle_window // data.sequence_tokens)


def window_bytes(data: Data) -> int:
    """Memory of a stage-0 replica for its windows, at most: tokens of 4 bytes, one more for each sequence."""
    return WINDOWS_HELD * window_sequences(data) * (data.sequence_tokens + 1) * np.dtype(np.int32).itemsize


def shuffled(
    line: Iterator[tuple[Ids, Position]], position: Position, seed: tuple[object, ...], most: int
) -> Iterator[tuple[Ids, Position]]:
    """The sequences of `line` in a random order within windows of `most`, each with the position after it.

    `line` begins where the window of `position` does; what was drawn of that is passed over. The next window is
    filled while one is drawn from, so nothing waits for it. A position that was kept where windows had another size
    lies in the window that begins where its own did.
    """
    start, drawn = replace(position, drawn=0), position.drawn
    window = _Window(start, most)
    while True:
        while not window.is_whole():
            window.add(line)
        following = _Window(window.end, most)
        order = DocumentOrder(window.count, (*seed, *asdict(window.start).values()))
        for place in range(drawn, window.count):
            if not following.is_whole():
                following.add(line)
            after = replace(window.start, drawn=place + 1) if place + 1 < window.count else window.end
            yield window.row(order[place]), after
        window, drawn = following, 0


def _pieces(read: Read, tokenizer: Tokenizer, position: Position, tally: TokenisingTally) -> Iterator[_Piece]:
    while True:
        documents = read(position.epoch, position.document)
        while texts := list(islice(documents, TOKENISED_AT_ONCE)):
            for ids in tokenised(texts, tokenizer, tally):
                yield _Piece(ids, position)
                position = replace(position, document=position.document + 1)
        if not position.document:
            raise DataError("The data has no document to train on: all of them are held out. Name more.")
        position = replace(position, epoch=position.epoch + 1, document=0)


def tokenised(texts: list[str], tokenizer: Tokenizer, tally: TokenisingTally) -> list[Ids]:
    """The ids of each text, each followed by the end of text."""
    began = tally.clock()
    end = np.array([tokenizer.end_of_text], np.int32)
    ids = [np.concatenate([part, end]) for part in tokenizer.encode_batch(texts)]
    tally.seconds += tally.clock() - began
    tally.documents += len(texts)
    tally.nbytes += sum(len(text.encode()) for text in texts)
    tally.tokens += sum(map(len, ids))
    return ids


def packed_once(documents: Iterator[str], tokenizer: Tokenizer, tokens: int) -> Iterator[Ids]:
    """Sequences [tokens + 1] of each document once; an incomplete one at the end is left out."""
    held, tally = np.empty(0, np.int32), TokenisingTally()
    while texts := list(islice(documents, TOKENISED_AT_ONCE)):
        held = np.concatenate([held, *tokenised(texts, tokenizer, tally)])
        while len(held) > tokens:
            yield held[: tokens + 1]
            held = held[tokens:]


def batch_of(rows: list[Ids]) -> Batch:
    windows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
