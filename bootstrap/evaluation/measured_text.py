"""The text that a loss is measured on: a run's held-out part, or files of one's own from their first token on."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bootstrap.export.tokenizer import byte_count, ids_of
from node.data.batches import TrainingData
from node.data.sources import Document, documents_of
from protocol.errors import DataError
from protocol.manifest import Manifest

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MeasuredText:
    """`batches` of inputs and labels [sequences, tokens]; a model predicts the labels, which are `bytes` of text."""

    batches: Sequence[Batch]
    bytes: int

    @property
    def sequences(self) -> int:
        return sum(inputs.shape[0] for inputs, _ in self.batches)


def held_out_text(
    manifest: Manifest, data: TrainingData, sequences: int, tokenizer: PreTrainedTokenizerBase
) -> MeasuredText:
    """The same held-out sequences whoever asks, in microbatches of the run's size."""
    tokens = manifest.data.sequence_tokens
    return measured(
        list(data.validation_batches(tokens, manifest.inner.sequences, limit=sequences)), tokenizer
    )


def text_of_files(
    places: Sequence[Path],
    field: str,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    at_once: int,
    limit: int | None = None,
) -> MeasuredText:
    """Each document in windows of `tokens`, one after another, the last one shorter; `at_once` windows make a batch.

    A text file is one document; JSONL, parquet and datasets have theirs in `field`. Every token but a document's
    first is predicted once, from what is before it in its window. With `limit` no more windows than that. Raises
    `DataError` when there is nothing to predict, or a file cannot be read.
    """
    batches: list[Batch] = []
    done = 0
    for document in (document for place in places for document in documents_of(place, field)):
        if limit is not None and done >= limit:
            break
        most = None if limit is None else (limit - done) * tokens + 1
        batches += _windows(_ids_of(document, tokenizer, most), tokens, at_once)
        done = sum(inputs.shape[0] for inputs, _ in batches)
    if not batches:
        raise DataError(f"There is nothing to predict in {', '.join(map(str, places))}. Name longer texts.")
    return measured(batches, tokenizer)


def measured(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> MeasuredText:
    """With the bytes of all labels counted."""
    rows = (row.tolist() for _, labels in batches for row in labels)
    return MeasuredText(batches, sum(byte_count(tokenizer, row) for row in rows))


def _ids_of(document: Document, tokenizer: PreTrainedTokenizerBase, most: int | None) -> NDArray[np.int32]:
    """The tokens of the document, the first `most` of them."""
    parts: list[NDArray[np.int32]] = []
    count = 0
    for text in _lines(document):
        parts.append(np.array(ids_of(tokenizer, text), np.int32))
        count += parts[-1].size
        if most is not None and count >= most:
            break
    return np.concatenate(parts)[:most] if parts else np.empty(0, np.int32)


def _lines(document: Document) -> Iterator[str]:
    """The document in parts that end with a line, so that no token lies across them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for block in document:
        text = rest + decoder.decode(block)
        end = text.rfind("\n") + 1
        if end:
            yield text[:end]
        rest = text[end:]
    if rest:
        yield rest


def _windows(ids: NDArray[np.int32], tokens: int, at_once: int) -> Iterator[Batch]:
    """Batches of whole windows, then what is left as a window of its own."""
    stream = torch.from_numpy(ids.astype(np.int64))
    whole = max(0, len(stream) - 1) // tokens
    inputs = stream[: whole * tokens].view(whole, tokens)
    labels = stream[1 : whole * tokens + 1].view(whole, tokens)
    for first in range(0, whole, at_once):
        yield inputs[first : first + at_once], labels[first : first + at_once]
    rest = stream[whole * tokens :]
    if len(rest) > 1:
        yield rest[None, :-1], rest[None, 1:]
