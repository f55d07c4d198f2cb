"""Validation loss: of a running swarm, of its starting weights and of an exported checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bootstrap.observer import Observer
from node.data.batches import TrainingData
from node.model.stage import Stage
from protocol.codec import encode
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused
from protocol.manifest import Manifest
from protocol.messages import Evaluate, Evaluated
from protocol.rpc import Traffic
from protocol.transport.base import PeerId

EVALUATION_DEADLINE = 120.0
IN_FLIGHT = 4
TRIES = 3

Progress = Callable[[int, int], None]  # (sequences done, of how many)


@dataclass(frozen=True)
class Loss:
    """Cross-entropy in nats a token, and over how many tokens."""

    nats: float
    tokens: int


async def evaluate_route(
    observer: Observer,
    data: TrainingData,
    route: Sequence[PeerId],
    sequences: int,
    progress: Progress = lambda done, total: None,
) -> Loss:
    """The loss of one replica of each stage, with their slow weights, on held-out `sequences`.

    Raises `PeerUnreachable`, `DeadlineExceeded` or `Refused` when a replica of the route fails for good.
    """
    manifest = observer.manifest
    batches = list(validation(manifest, data, sequences))
    slots = asyncio.Semaphore(IN_FLIGHT)
    done = 0

    async def one(inputs: torch.Tensor, labels: torch.Tensor) -> Evaluated:
        nonlocal done
        async with slots:
            evaluated = await _evaluate(observer, route, inputs, labels)
            done += inputs.shape[0]
            progress(done, sequences)
            return evaluated

    results = await asyncio.gather(*(one(inputs, labels) for inputs, labels in batches))
    return _mean([(result.loss_sum, result.tokens) for result in results])


async def _evaluate(
    observer: Observer, route: Sequence[PeerId], inputs: torch.Tensor, labels: torch.Tensor
) -> Evaluated:
    tensors = [encode(inputs.to(torch.int32), "int32"), encode(labels.to(torch.int32), "int32")]
    request = Evaluate(stage=0, route=list(route[1:]))
    for attempt in range(TRIES):
        try:
            evaluated, _ = await observer.rpc.call(
                route[0], Traffic.PIPELINE, request, Evaluated, tensors, deadline=EVALUATION_DEADLINE
            )
            return evaluated
        except (PeerUnreachable, DeadlineExceeded, Refused):
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(0.5)
    raise AssertionError("the loop returns or raises")


@torch.no_grad()
def starting_loss(manifest: Manifest, data: TrainingData, sequences: int) -> Loss:
    """The loss of the weights that every run of this manifest starts from, computed here."""
    stages = [Stage(manifest, index) for index in range(manifest.stages)]
    sums = []
    for inputs, labels in validation(manifest, data, sequences):
        hidden = inputs
        for stage in stages:
            hidden = stage(hidden)
        sums.append((_loss_sum(hidden, labels), labels.numel()))
    return _mean(sums)


@torch.no_grad()
def checkpoint_loss(directory: Path, manifest: Manifest, data: TrainingData, sequences: int) -> Loss:
    """The loss of an exported checkpoint by plain transformers code: nothing of ours but the text."""
    disable_progress_bar()  # ours is the only one on the screen
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sums = []
    for inputs, labels in validation(manifest, data, sequences):
        sums.append((_loss_sum(model(input_ids=inputs).logits, labels), labels.numel()))
    return _mean(sums)


def validation(
    manifest: Manifest, data: TrainingData, sequences: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same held-out sequences whoever asks, in microbatches of the run's size."""
    return data.validation_batches(manifest.data.sequence_tokens, manifest.inner.sequences, limit=sequences)


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").item()


def _mean(sums: Sequence[tuple[float, int]]) -> Loss:
    tokens = sum(count for _, count in sums)
    return Loss(sum(total for total, _ in sums) / tokens, tokens)
