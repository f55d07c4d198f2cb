"""Loss on a text: of a running swarm, of its starting weights and of an exported checkpoint."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bootstrap.evaluation.measured_text import MeasuredText
from bootstrap.inspect.observer import Observer
from node.model.stage import Stage, logits_through
from protocol.codec import encode
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused
from protocol.manifest import Manifest
from protocol.messages import Evaluate, Evaluated
from protocol.patience import Patience
from protocol.rpc import Traffic
from protocol.supervision import all_of
from protocol.transport.base import PeerId

EVALUATION_DEADLINE = 60.0  # of silence: a slow stage that trains says that it will come to it
EVALUATION_STANDSTILL = 1_200.0  # longer than the nodes wait for each other
IN_FLIGHT = 4
TRIES = 3

Progress = Callable[[int, int], None]  # (sequences done, of how many)


@dataclass(frozen=True)
class Loss:
    """Cross-entropy in nats a token, over how many tokens, of how many bytes of text."""

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))  # beyond that there is no float

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers: what coding a byte of the text costs."""
        return self.nats * self.tokens / (math.log(2) * max(1, self.bytes))

    def __str__(self) -> str:
        return (
            f"{self.nats:.4f} nats per token, perplexity {self.perplexity:,.3f}, "
            f"{self.bits_per_byte:.4f} bits per byte, on {self.tokens:,} tokens ({self.bytes:,} bytes)"
        )


async def evaluate_route(
    observer: Observer,
    text: MeasuredText,
    route: Sequence[PeerId],
    progress: Progress = lambda done, total: None,
) -> Loss:
    """The loss of one replica of each stage, with their slow weights.

    Raises `PeerUnreachable`, `DeadlineExceeded` or `Refused` when a replica of the route fails for good.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    done = 0

    async def one(inputs: torch.Tensor, labels: torch.Tensor) -> Evaluated:
        nonlocal done
        async with slots:
            evaluated = await _evaluate(observer, route, inputs, labels)
            done += inputs.shape[0]
            progress(done, text.sequences)
            return evaluated

    results = await all_of(*(one(inputs, labels) for inputs, labels in text.batches))
    return _mean([(result.loss_sum, result.tokens) for result in results], text)


async def _evaluate(
    observer: Observer, route: Sequence[PeerId], inputs: torch.Tensor, labels: torch.Tensor
) -> Evaluated:
    tensors = [encode(inputs.to(torch.int32), "int32"), encode(labels.to(torch.int32), "int32")]
    back = route[:1] if observer.manifest.is_ring else []
    request = Evaluate(stage=0, route=[*route[1:], *back])
    for attempt in range(TRIES):
        try:
            evaluated, _ = await observer.rpc.call(
                route[0],
                Traffic.PIPELINE,
                request,
                Evaluated,
                tensors,
                deadline=Patience(EVALUATION_DEADLINE, EVALUATION_STANDSTILL),
            )
            return evaluated
        except (PeerUnreachable, DeadlineExceeded, Refused):
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(0.5)
    raise AssertionError("the loop returns or raises")


@torch.no_grad()
def starting_loss(manifest: Manifest, text: MeasuredText) -> Loss:
    """The loss of the weights that every run of this manifest starts from, computed here."""
    stages = [Stage(manifest, index) for index in range(manifest.stages)]
    sums = []
    for inputs, labels in text.batches:
        sums.append((_loss_sum(logits_through(stages, inputs), labels), labels.numel()))
    return _mean(sums, text)


@torch.no_grad()
def model_loss(model: Any, text: MeasuredText, progress: Progress = lambda done, total: None) -> Loss:
    """The loss of a causal language model of transformers."""
    sums, done = [], 0
    for inputs, labels in text.batches:
        logits = model(input_ids=inputs.to(model.device)).logits
        sums.append((_loss_sum(logits, labels.to(model.device)), labels.numel()))
        done += inputs.shape[0]
        progress(done, text.sequences)
    return _mean(sums, text)


def checkpoint_loss(model: Path | str, text: MeasuredText) -> Loss:
    """The loss of a checkpoint, a directory's or the hub's, by plain transformers code in float32."""
    disable_progress_bar()  # ours is the only one on the screen
    return model_loss(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), text)


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").item()


def _mean(sums: Sequence[tuple[float, int]], text: MeasuredText) -> Loss:
    tokens = sum(count for _, count in sums)
    return Loss(sum(total for total, _ in sums) / tokens, tokens, text.bytes)
