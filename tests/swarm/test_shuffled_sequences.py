"""Sequences come shuffled: those of a step are of many documents; a model learns from them as from random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, islice

import numpy as np
import pytest
import torch

from bootstrap.lab.simulation import learning
from bootstrap.lab.simulation.study import one_setting
from node.data.batches import Batch, TokenisingTally, TrainingData, batch_of, packed_once
from node.data.documents import Split
from node.data.tokenizer import ByteTokenizer
from node.model.replica import Replica
from node.storage.position import Position
from protocol.run.manifest import Manifest, load_preset
from tests.swarm.micro import MadeUpDocuments, micro_manifest

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def lines_of(data: TrainingData, manifest: Manifest) -> Iterator[Batch]:
    return (batch for batch, _ in data.batches("run", "peer", manifest, Position(data.identity)))


def test_sequences_in_a_row_are_of_many_documents() -> None:
    """With a manifest's defaults and a corpus of as many documents as the Python library's sources."""
    texts = [f"{number:04} " * 400 for number in range(1_300)]
    data = TrainingData(MadeUpDocuments(texts, Split(0.05)), ByteTokenizer())
    manifest = micro_manifest(data__sequence_tokens=128)
    line = (row for inputs, _ in lines_of(data, manifest) for row in inputs)
    for _ in range(5):
        of = {bytes(row.tolist()).decode().split()[1] for row in islice(line, 64)}
        assert len(of) >= 56


def test_the_sequences_of_a_microbatch_say_as_different_things_as_random_ones() -> None:
    """Each document has letters of its own, so that the gradients of neighbours in one point the same way."""
    rng = random.Random(3)
    texts = ["".join(rng.choices(rng.sample(LETTERS, 6), k=4_000)) for _ in range(300)]
    data = TrainingData(MadeUpDocuments(texts, Split(0.05)), ByteTokenizer())
    manifest = micro_manifest(stages=1, data__sequence_tokens=64, inner__sequences=2)
    in_a_row = packed_once(data.documents.training((), 0, 0), ByteTokenizer(), 64)
    neighbours = [batch_of(list(rows)) for rows in zip(*[islice(in_a_row, 120)] * 2, strict=True)]
    together = list(islice(lines_of(data, manifest), 100))
    rows = [(inputs[i], labels[i]) for inputs, labels in together for i in range(2)]
    pairs = rng.sample(list(combinations(rows, 2)), 100)
    anywhere = [(torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]])) for a, b in pairs]
    replica = trained_a_little(manifest, together)
    of_random = mean_cosine(replica, anywhere)
    assert mean_cosine(replica, together) == pytest.approx(of_random, abs=0.02)
    assert mean_cosine(replica, neighbours) > of_random + 0.1  # what it would be without


def trained_a_little(manifest: Manifest, batches: list[Batch]) -> Replica:
    """Past the first steps, in which all gradients say how often which letter is."""
    replica = Replica(manifest, 0)
    for inputs, labels in batches[:60]:
        replica.passes.last_stage(inputs, labels)
        replica.inner_step(1)
    return replica


def mean_cosine(replica: Replica, pairs: list[Batch]) -> float:
    """Of the gradients of the two sequences of each pair."""

    def gradient(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        replica.flat.gradients.zero_()
        replica.passes.last_stage(inputs, labels)
        return replica.flat.gradients.clone()

    found = []
    for inputs, labels in pairs:
        one, other = (gradient(inputs[i : i + 1], labels[i : i + 1]) for i in range(2))
        found.append(torch.nn.functional.cosine_similarity(one, other, dim=0))
    replica.flat.gradients.zero_()
    return float(torch.stack(found).mean())


class UniformDraws(TrainingData):
    """Any sequence of the training documents at any time, with replacement."""

    def batches(
        self,
        run_id: str,
        peer_id: str,
        manifest: Manifest,
        position: Position,
        tally: TokenisingTally | None = None,
    ) -> Iterator[tuple[Batch, Position]]:
        tokens, rng = (
            manifest.data.sequence_tokens,
            np.random.default_rng(int.from_bytes(peer_id.encode()[-8:])),
        )
        texts = self.documents.training((), 0, 0)
        text = np.frombuffer("\0".join(texts).encode(), np.uint8)
        while True:
            starts = rng.integers(len(text) - tokens, size=manifest.inner.sequences)
            rows = [text[start : start + tokens + 1].astype(np.int32) for start in starts]
            yield batch_of(rows), position


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_swarm_learns_as_well_as_from_uniform_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = one_setting(load_preset("tiny"), 1_000, 1, 2, replicas=4, stages=1)
    shuffled = learning.simulate(setting).loss
    original = learning.text_of

    def uniform(manifest: Manifest, texts: tuple[str, ...] = ()) -> TrainingData:
        data = original(manifest, texts)
        return UniformDraws(data.documents, data.tokenizer)

    monkeypatch.setattr(learning, "text_of", uniform)
    assert shuffled == pytest.approx(learning.simulate(setting).loss, abs=0.02)
