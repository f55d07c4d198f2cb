"""The text that a loss is measured on: a run's held-out part, or files of one's own from their first token on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bootstrap.export.tokenizer import byte_count, ids_of
from node.data.corpus import Corpus
from protocol.errors import DataError
from protocol.manifest import Manifest

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
READ_AT_ONCE = 2**20  # bytes, up to the end of a line: tokenizers take a hundred times the memory for a while


@dataclass(frozen=True)
class MeasuredText:
    """`batches` of inputs and labels [sequences, tokens]; a model predicts the labels, which are `bytes` of text."""

    batches: Sequence[Batch]
    bytes: int

    @property
    def sequences(self) -> int:
        return sum(inputs.shape[0] for inputs, _ in self.batches)


def held_out_text(
    manifest: Manifest, corpus: Corpus, sequences: int, tokenizer: PreTrainedTokenizerBase
) -> MeasuredText:
    """The same held-out sequences whoever asks, in microbatches of the run's size."""
    tokens = manifest.data.sequence_tokens
    return measured(
        list(corpus.validation_batches(tokens, manifest.inner.sequences, limit=sequences)), tokenizer
    )


def text_of_files(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    at_once: int,
    limit: int | None = None,
) -> MeasuredText:
    """Each file in windows of `tokens`, one after another, the last one shorter; `at_once` windows make a batch.

    Every token but a file's first is predicted once, from what is before it in its window. With `limit` no more
    windows than that. Raises `DataError` when there is nothing to predict, or a file is not UTF-8 text.
    """
    batches: list[Batch] = []
    for file in files:
        done = sum(inputs.shape[0] for inputs, _ in batches)
        if limit is not None and done >= limit:
            break
        most = None if limit is None else (limit - done) * tokens + 1
        batches += _windows(_ids_of(file, tokenizer, most), tokens, at_once)
    if not batches:
        raise DataError(
            f"There is nothing to predict in {', '.join(map(str, files))}. Name longer text files."
        )
    return measured(batches, tokenizer)


def measured(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> MeasuredText:
    """With the bytes of all labels counted."""
    rows = (row.tolist() for _, labels in batches for row in labels)
    return MeasuredText(batches, sum(byte_count(tokenizer, row) for row in rows))


def _ids_of(file: Path, tokenizer: PreTrainedTokenizerBase, most: int | None) -> NDArray[np.int32]:
    """The tokens of the file, the first `most` of them."""
    parts: list[NDArray[np.int32]] = []
    count = 0
    for text in _blocks(file):
        parts.append(np.array(ids_of(tokenizer, text), np.int32))
        count += parts[-1].size
        if most is not None and count >= most:
            break
    return np.concatenate(parts)[:most] if parts else np.empty(0, np.int32)


def _blocks(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            while block := lines.readlines(READ_AT_ONCE):
                yield "".join(block)
    except OSError as error:
        raise DataError(
            f"Cannot read {file} ({error.strerror}). Check the path and its permissions."
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text. Convert it, or name another file.") from None


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
