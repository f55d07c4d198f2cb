"""Text to train on: files joined into one array of bytes, each byte a token, the end held out for validation.

Peers share nothing but the manifest, so a training batch is a pure function of run, peer, step and index:
peers draw different windows with no coordination, and a peer that restarts draws its own again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from node.data.batches import Batch, Position, TokenisingTally
from node.data.paths import files_of
from protocol.errors import DataError
from protocol.manifest import Manifest

VOCABULARY = 256
# Added to every count of the bigram model. With it the two entropies of Python 3.11's library are 3.203 and
# 2.491 nats per byte, as published beside the reference losses; 0.1 or 1 change the latter by 0.001.
_PSEUDO_COUNT = 0.01
_COUNTED_AT_ONCE = 2**22  # bytes; numpy counts in int64, eight times the text

Bytes: TypeAlias = NDArray[np.uint8]


def load_corpus(source: str | Sequence[str], held_out_fraction: float = 0.05) -> Corpus:
    """Read and join the files of `source` in order; the last `held_out_fraction` of the bytes is held out.

    `source` is "python-stdlib", a path or a glob (`**` recurses, ~ is the home folder), or a list of these;
    the files of a glob are sorted by path, and a file named twice is read once. Empty files are skipped where
    a glob found them. Raises `DataError` for a file that is missing, unreadable, binary, or named and empty.
    """
    if not 0 < held_out_fraction < 1:
        raise DataError(f"The held-out fraction is {held_out_fraction}; it must lie between 0 and 1.")
    sources = [source] if isinstance(source, str) else source
    paths = dict.fromkeys(path for entry in sources for path in files_of(entry))
    parts = [_read_text(path) for path in paths]
    text = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    if not text.size:
        raise DataError(f"The data source {source!r} holds no text. Name files with text in them.")
    return Corpus(text, int(text.size * (1 - held_out_fraction)))


@dataclass(frozen=True, eq=False)
class Corpus:
    """`text` is uint8 [length]; its first `train_length` bytes are for training, the rest is held out."""

    text: Bytes
    train_length: int

    @property
    def train(self) -> Bytes:
        return self.text[: self.train_length]

    @property
    def held_out(self) -> Bytes:
        return self.text[self.train_length :]

    @property
    def identity(self) -> str:
        return self.content_hash

    @property
    def tally(self) -> TokenisingTally:
        """Nothing is tokenised: bytes are tokens."""
        return TokenisingTally()

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the joined text in hexadecimal: whether two peers train on the same bytes."""
        return hashlib.sha256(self.text.data).hexdigest()

    def require(self, tokens: int) -> None:
        """Raises `DataError` when sequences of `tokens` fit not once into both parts; for use at start-up."""
        _windows(self.train, tokens, "training")
        _windows(self.held_out, tokens, "held-out")

    def train_batch(
        self, rng: np.random.Generator | int | Sequence[int], sequences: int, tokens: int
    ) -> Batch:
        """Inputs and labels, int64 [sequences, tokens] each: windows at random in the training part.

        Labels are the inputs one byte later. `rng` is a generator, which moves on, or a seed. Raises
        `DataError` when the training part is shorter than one window, that is tokens + 1 bytes.
        """
        windows = _windows(self.train, tokens, "training")
        starts = np.random.default_rng(rng).integers(windows, size=sequences)
        return _gather(self.train, starts, tokens)

    def draw(self, run_id: str, peer_id: str, step: int, index: int, sequences: int, tokens: int) -> Batch:
        """`train_batch` seeded by (run, peer, step, index): the same batch of a corpus, anywhere and always.

        `index` counts the microbatches that the peer draws within an inner step.
        """
        digest = hashlib.sha256(repr((run_id, peer_id, step, index)).encode()).digest()
        philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
        return self.train_batch(np.random.Generator(philox), sequences, tokens)

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position
    ) -> Iterator[tuple[Batch, Position]]:
        """`draw` for ever. Windows have no order to go through: `position.document` counts microbatches."""
        inner, tokens = manifest.inner, manifest.data.sequence_tokens
        for number in count(position.document):
            step, index = divmod(number, inner.microbatches)
            batch = self.draw(run_id, peer_id, step, index, inner.sequences, tokens)
            yield batch, replace(position, document=number + 1)

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        """Batches as of `train_batch` over the held-out part, the same windows at every call.

        The windows are evenly spaced and do not overlap: at most `limit` of them in all, else as many as fit.
        The last batch may have fewer sequences. Raises `DataError` when not one window fits.
        """
        _windows(self.held_out, tokens, "held-out")
        fitting = self.held_out.size // (tokens + 1)
        count = fitting if limit is None else min(fitting, limit)
        starts = np.arange(count) * (self.held_out.size // max(count, 1))
        for first in range(0, count, sequences):
            yield _gather(self.held_out, starts[first : first + sequences], tokens)

    def unigram_entropy(self) -> float:
        """Nats per byte of the held-out part under the byte frequencies of the training part.

        What a model that learned only how common each byte is would score: the first mark to pass.
        """
        return _cross_entropy(_counts(self.train), _counts(self.held_out))

    def bigram_entropy(self) -> float:
        """Nats per byte of the held-out part under the training part's frequencies of a byte after another.

        What a model that sees only the byte before would score: below it, attention has begun to work.
        """
        return _cross_entropy(_pair_counts(self.train), _pair_counts(self.held_out))


def _read_text(path: Path) -> Bytes:
    try:
        text = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"Cannot read {path} ({error}). Check its permissions.") from error
    if not text.all():
        raise DataError(f"{path} is binary: it has NUL bytes. Name text files only.")
    return text


def _windows(part: Bytes, tokens: int, name: str) -> int:
    """How many windows of tokens + 1 bytes start in `part`, overlapping ones included; at least one."""
    if part.size <= tokens:
        raise DataError(
            f"The {name} part of the data has {part.size} bytes; sequences of {tokens} tokens need at least "
            f"{tokens + 1}. Name more files, or shorten the sequences."
        )
    return int(part.size - tokens)


def _gather(part: Bytes, starts: NDArray[np.int64], tokens: int) -> Batch:
    windows = torch.from_numpy(part[starts[:, None] + np.arange(tokens + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _counts(text: Bytes) -> NDArray[np.int64]:
    """[1, 256]: how often each byte occurs."""
    counts = np.zeros(VOCABULARY, np.int64)
    for start in range(0, text.size, _COUNTED_AT_ONCE):
        counts += np.bincount(text[start : start + _COUNTED_AT_ONCE], minlength=VOCABULARY)
    return counts[None]


def _pair_counts(text: Bytes) -> NDArray[np.int64]:
    """[256, 256]: how often byte j follows byte i."""
    counts = np.zeros(VOCABULARY**2, np.int64)
    for start in range(0, text.size - 1, _COUNTED_AT_ONCE):
        part = text[start : start + _COUNTED_AT_ONCE + 1]
        pairs = part[:-1].astype(np.uint16) * VOCABULARY + part[1:]
        counts += np.bincount(pairs, minlength=VOCABULARY**2)
    return counts.reshape(VOCABULARY, VOCABULARY)


def _cross_entropy(fitted: NDArray[np.int64], seen: NDArray[np.int64]) -> float:
    """Mean of −log p over what was `seen`, p the row-wise frequencies of `fitted`, smoothed; NaN if empty."""
    smoothed = fitted + _PSEUDO_COUNT
    log_p = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))
    total = seen.sum()
    return float(-(seen * log_p).sum() / total) if total else math.nan
