"""Replicas of all stages of a small model in one process, trained without a network."""

from __future__ import annotations

from typing import Any

import torch

from node.model.replica import Replica
from protocol.run.manifest import Manifest
from tests.swarm.micro import micro_batch, micro_manifest

MICROBATCHES = 2


def manifest_cut(stages: int, **changes: Any) -> Manifest:
    changes.setdefault("inner__weight_decay", 0.1)
    changes.setdefault("inner__clip_norm", 1e6)  # per stage in the swarm, over the whole model in the loop
    return micro_manifest(stages=stages, model__layers=4, **changes)


def replicas_of(manifest: Manifest) -> list[Replica]:
    return [Replica(manifest, index) for index in range(manifest.stages)]


def batch(manifest: Manifest, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return micro_batch(seed, manifest.inner.sequences, manifest.data.sequence_tokens)


def carry(replicas: list[Replica], tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """One microbatch through all stages and back, as the pipeline does it."""
    *before, last = replicas
    kept, hidden = [], tokens
    for replica in before:
        leaf, outputs = replica.passes.forward(hidden)
        kept.append((leaf, outputs))
        hidden = outputs.detach()
    loss, gradient = last.passes.last_stage(hidden, labels)
    for replica, (leaf, outputs) in zip(reversed(before), reversed(kept), strict=True):
        assert gradient is not None
        gradient = replica.passes.backward(leaf, outputs, gradient)
    assert gradient is None  # tokens have none
    return loss.item()


def train_step(replicas: list[Replica], seed: int) -> float:
    """One inner step of all stages; returns the mean loss."""
    manifest = replicas[0].manifest
    losses = [carry(replicas, *batch(manifest, 10 * seed + i)) for i in range(MICROBATCHES)]
    for replica in replicas:
        replica.inner_step(MICROBATCHES)
    return sum(losses) / MICROBATCHES


def weights_of(replicas: list[Replica]) -> dict[str, torch.Tensor]:
    return {place.name: place.of(r.flat.values).clone() for r in replicas for place in r.flat.slices}


def gradients_of(replicas: list[Replica]) -> dict[str, torch.Tensor]:
    return {place.name: place.of(r.flat.gradients).clone() for r in replicas for place in r.flat.slices}
