"""Documents to sequences: tokens of one document after another, each followed by the end of text, cut evenly.

Sequences may begin and end within documents and hold several. A sequence's labels are its inputs one token later, so
the last label of one is the first input of the next: every token is an input once, and none is lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from node.data.batches import Batch, Position, TokenisingTally
from node.data.tokenizer import Ids, Tokenizer
from protocol.errors import DataError

TOKENISED_AT_ONCE = 16  # documents: enough to occupy all cores, few enough that little is made in vain

Read = Callable[[int, int], Iterator[str]]  # the documents of an epoch, from a number on


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
            raise DataError(
                "The data has no document to train on: all of them are held out. Name more files."
            )
        position = replace(position, epoch=position.epoch + 1, document=0)


def tokenised(texts: list[str], tokenizer: Tokenizer, tally: TokenisingTally) -> list[Ids]:
    """The ids of each text with the end of text behind them."""
    began = time.perf_counter()
    end = np.array([tokenizer.end_of_text], np.int32)
    ids = [np.concatenate([part, end]) for part in tokenizer.encode_batch(texts)]
    seconds = time.perf_counter() - began
    tally.add(len(texts), sum(len(text.encode()) for text in texts), sum(map(len, ids)), seconds)
    return ids


def packed_once(documents: Iterator[str], tokenizer: Tokenizer, tokens: int) -> Iterator[Ids]:
    """The same of each of the documents once; what does not fill a sequence at the end is left out."""
    held, tally = np.empty(0, np.int32), TokenisingTally()
    while texts := list(islice(documents, TOKENISED_AT_ONCE)):
        held = np.concatenate([held, *tokenised(texts, tokenizer, tally)])
        while len(held) > tokens:
            yield held[: tokens + 1]
            held = held[tokens:]


def batch_of(rows: list[Ids]) -> Batch:
    windows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
