"""How well bytes can be guessed without a model: from how common they are, alone and after one another."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bootstrap.evaluation.measured_text import MeasuredText
from node.data.batches import Position, TrainingData
from protocol.manifest import Manifest

VOCABULARY = 256
PSEUDO_COUNT = (
    0.01  # added to every count: of bytes that were never seen; 0.1 or 1 change the bigram's by 0.001
)
EPOCH_TOKENS, EPOCH_SEQUENCES = 2**16, 16  # of a batch while an epoch is counted: a mebibyte at once


def entropies_of(manifest: Manifest, data: TrainingData, text: MeasuredText) -> tuple[float, float]:
    """(unigram, bigram): nats per byte of `text` under the frequencies in one epoch of `data`, bytes as tokens.

    What a model would score that learned only how common each byte is, the first mark to pass; and one that sees
    only the byte before: below that, attention has begun to work.
    """
    trained, seen = _pairs_of_epoch(manifest, data), np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for inputs, labels in text.batches:
        seen += _pairs(inputs, labels)
    alone = trained.sum(axis=0, keepdims=True), seen.sum(axis=0, keepdims=True)
    return _cross_entropy(*alone), _cross_entropy(trained, seen)


def _pairs_of_epoch(manifest: Manifest, data: TrainingData) -> NDArray[np.int64]:
    """[256, 256]: how often byte j follows byte i in what is trained on."""
    wide = manifest.model_copy(
        update={
            "data": manifest.data.model_copy(update={"sequence_tokens": EPOCH_TOKENS}),
            "inner": manifest.inner.model_copy(update={"sequences": EPOCH_SEQUENCES}),
        }
    )
    counts = np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for (inputs, labels), position in data.batches("", "", wide, Position(data.identity)):
        counts += _pairs(inputs, labels)
        if position.epoch:
            return counts
    return counts


def _pairs(inputs: Tensor, labels: Tensor) -> NDArray[np.int64]:
    pairs = (inputs * VOCABULARY + labels).flatten().numpy()
    return np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)


def _cross_entropy(fitted: NDArray[np.int64], seen: NDArray[np.int64]) -> float:
    """Mean of −log p over what was `seen`, p the row-wise frequencies of `fitted`, smoothed; NaN if empty."""
    smoothed = fitted + PSEUDO_COUNT
    log_p = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))
    total = seen.sum()
    return float(-(seen * log_p).sum() / total) if total else math.nan
