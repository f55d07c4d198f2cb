"""What training draws from: an endless line of microbatches, each with the position at which to go on after it.

Tokens of one document after another, each followed by the end of text, are cut evenly: sequences may begin and end
within documents and hold several. A sequence's labels are its inputs one token later, so the last label of one is the
first input of the next: every token is an input once, and none is lost.
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

from node.data.documents import Documents
from protocol.errors import DataError
from protocol.manifest import Manifest

if TYPE_CHECKING:  # not when it runs: a look at a checkpoint's position does without tokenizers
    from node.data.tokenizer import Ids, Tokenizer

TOKENISED_AT_ONCE = 16  # documents: enough to occupy all cores, few enough that little is made in vain
SPREAD = 8  # of all held-out sequences read, one in so many is measured on where not all are asked for

Read: TypeAlias = Callable[[int, int], Iterator[str]]  # the documents of an epoch, from a number on
Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs and labels, int64 [sequences, tokens] each


@dataclass(frozen=True)
class Position:
    """Where a volunteer is in its corpus; a few numbers that are kept with the checkpoint.

    The next sequence begins at token `token` of the `document`-th document of epoch `epoch`, in the order in which
    this volunteer trains on them. `corpus` is the identity of what was counted.
    """

    corpus: str
    epoch: int = 0
    document: int = 0
    token: int = 0

    def facts(self) -> dict[str, str | int]:
        return asdict(self)

    @classmethod
    def of(cls, facts: object) -> Position | None:
        """Read from what was saved; None when that is unusable."""
        if not isinstance(facts, dict):
            return None
        corpus, numbers = facts.get("corpus"), [facts.get(name) for name in ("epoch", "document", "token")]
        counts = [number for number in numbers if isinstance(number, int) and number >= 0]
        return cls(corpus, *counts) if isinstance(corpus, str) and len(counts) == len(numbers) else None


@dataclass
class TokenisingTally:
    """Mutable, written by the thread that makes batches: what it has tokenised, and in how much time."""

    documents: int = 0
    nbytes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def rate(self) -> tuple[float, float]:
        """Bytes and tokens in a second of tokenising."""
        seconds = max(self.seconds, 1e-9)
        return self.nbytes / seconds, self.tokens / seconds


class TrainingData:
    """Documents and a tokenizer: what a run trains and validates on.

    Nothing is tokenised before it is needed, and nothing of it is kept. `identity` is the same for the same text,
    wherever it is.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        self.identity = documents.identity
        self.tally = TokenisingTally()

    def require(self, tokens: int) -> None:
        """Raises `DataError` when there is not one sequence of `tokens` to train on; for use at start-up."""
        some = self._documents.training((), 0, 0)
        if next(packed_once(some, self._tokenizer, tokens), None) is None:
            raise DataError(
                f"The data is too short to train on: sequences have {tokens} tokens, and all documents that are not "
                "held out have no more. Name more text with --data."
            )

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position
    ) -> Iterator[tuple[Batch, Position]]:
        """Microbatches for ever, seeded by (run, peer), from `position` on, each with the position after it."""

        def read(epoch: int, first: int) -> Iterator[str]:
            return self._documents.training((run_id, peer_id), epoch, first)

        tokens, size = manifest.data.sequence_tokens, manifest.inner.sequences
        line = sequences(read, self._tokenizer, tokens, position, self.tally)
        while True:
            drawn = list(islice(line, size))
            yield batch_of([ids for ids, _ in drawn]), drawn[-1][1]

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        """At most `limit` held-out sequences in batches of `sequences`, the same at every call.

        They are spread over `SPREAD` times as many, so that a few do not come from a document or two. The last batch
        may have fewer. Raises `DataError` when there is not one.
        """
        held_out = self._held_out(tokens, limit)
        rows = list(islice(held_out, sequences))
        if not rows:
            raise DataError(
                f"The held-out documents of the data have fewer than the {tokens + 1} tokens of a sequence. Name "
                "more text, or found the run with a larger data.held_out or a smaller data.longest_document."
            )
        while rows:
            yield batch_of(rows)
            rows = list(islice(held_out, sequences))

    def _held_out(self, tokens: int, limit: int | None) -> Iterator[Ids]:
        packed = packed_once(self._documents.held_out(), self._tokenizer, tokens)
        if limit is None:
            return packed
        found = list(islice(packed, SPREAD * limit))
        return islice(found, 0, limit * (step := max(1, len(found) // limit)), step)


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
        joined = np.concatenate([piece.ids for piece in held])[skip : skip + tokens + 1]
        skip, length = skip + tokens, length - tokens
        while skip >= len(held[0].ids):
            skip -= len(held.popleft().ids)
        yield joined, replace(held[0].position, token=skip)


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
    began = time.perf_counter()
    end = np.array([tokenizer.end_of_text], np.int32)
    ids = [np.concatenate([part, end]) for part in tokenizer.encode_batch(texts)]
    tally.seconds += time.perf_counter() - began
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
