"""Peers of a simulated swarm that do wrong, by kind: what they tell partners, and what they send along the pipeline.

Those that poison averages or rounds, or lie in records, sit in every stage; the others in the stage where their kind
is possible. `lying_network` has those that lie in answers, requests and records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.simulation.attackers import Attack, Attacker, Honest
from bootstrap.lab.simulation.lying_network import (
    FalseRecords,
    FalseStats,
    Flooding,
    Holding,
    OddAnswers,
    Silent,
)
from node.data.batches import Batch, TrainingData
from node.model.passes import Learned, Passes
from node.model.replica import Replica
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest

CLIP = 1.5  # the radius that tuned attackers stay inside, as the presets for volunteers have it
WRONG_PART = 0.1  # of the microbatches whose gradients are wrong
EVERY_STAGE = None
FIRST, LAST = 0, -1

MakeReplica = Callable[[Manifest, int, str], Replica]


class WrongActivations(Passes):
    """Sends noise instead of activations, of the same mean and deviation; trains as if it had not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, outputs = super().forward(inputs)
        honest = outputs.detach()
        drawn = torch.randn(honest.shape, generator=self._generator).to(honest)
        noise = drawn * honest.std() + honest.mean()
        return leaf, outputs + (noise - honest)


class WrongGradients(Passes):
    """Turns round the gradients of a tenth of the microbatches; the loss that it tells is right."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generator = torch.Generator().manual_seed(0)

    def last_stage(self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf) -> Learned:
        loss, by_inputs = super().last_stage(inputs, labels, most)
        is_wrong = torch.rand((), generator=self._generator).item() < WRONG_PART
        return loss, -by_inputs if by_inputs is not None and is_wrong else by_inputs


class CachedAnswers(Passes):
    """Computes one microbatch and answers all others with what came of that: a free rider."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._answer: Learned | None = None

    def last_stage(self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf) -> Learned:
        if self._answer is None:
            loss, by_inputs = super().last_stage(inputs, labels, most)
            self._answer = loss.detach().clone(), None if by_inputs is None else by_inputs.clone()
        self.has_run = True
        return self._answer


class FlippedLabels:
    """Text whose labels are turned round: the first token of the vocabulary for the last. Held-out text is right."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batches(self, run: str, peer: str, manifest: Manifest, *rest: Any) -> Iterator[tuple[Batch, Any]]:
        """See `TrainingData.batches`."""
        for (inputs, labels), position in self._data.batches(run, peer, manifest, *rest):
            yield (inputs, manifest.model.vocab_size - 1 - labels), position


@dataclass(frozen=True)
class Lie:
    """How one kind of attacker is made. `stage` is where it sits, the rest what is its own there."""

    stage: int | None
    poison: Attack | None = None
    passes: type[Passes] | None = None
    flips_labels: bool = False
    rpc: type[Rpc] = Rpc
    transport: type[MemoryTransport] = MemoryTransport

    def sits_in(self, stage: int, stages: int) -> bool:
        return self.stage is EVERY_STAGE or self.stage % stages == stage

    def replica(self, honest: Callable[[int], list[Replica]], number: int) -> MakeReplica:
        """What makes the replica of attacker `number`; `honest` gives the honest ones of a stage."""
        if self.poison is not None:
            attack = self.poison
            return lambda manifest, stage, device: Attacker(
                manifest, stage, device, attack=attack, honest=_of(honest, stage), number=number
            )
        return Replica if self.passes is None else replica_with(self.passes)


def replica_with(passes: type[Passes]) -> MakeReplica:
    """What makes replicas that compute with these passes."""

    def made(manifest: Manifest, stage: int, device: str) -> Replica:
        replica = Replica(manifest, stage, device)
        replica.passes = passes(replica.stage, replica.device, replica.slow_weights())
        return replica

    return made


def _of(honest: Callable[[int], list[Replica]], stage: int) -> Honest:
    return lambda: honest(stage)


LIES: dict[str, Lie] = {
    "sign-flip": Lie(EVERY_STAGE, Attack("sign-flip", strength=1.0)),
    "scaled": Lie(EVERY_STAGE, Attack("sign-flip", strength=-10.0)),
    "inner-product": Lie(EVERY_STAGE, Attack("inner-product", clip=CLIP)),
    "drift": Lie(EVERY_STAGE, Attack("collusion", clip=CLIP)),
    "label-flip": Lie(FIRST, flips_labels=True),
    "wrong-activations": Lie(FIRST, passes=WrongActivations),
    "wrong-gradients": Lie(LAST, passes=WrongGradients),
    "cached-answers": Lie(LAST, passes=CachedAnswers),
    "odd-answers": Lie(LAST, rpc=OddAnswers),
    "holding": Lie(LAST, rpc=Holding),
    "false-stats": Lie(LAST, rpc=FalseStats),
    "flooding": Lie(FIRST, rpc=Flooding),
    "silent": Lie(EVERY_STAGE, rpc=Silent),
    "false-records": Lie(EVERY_STAGE, transport=FalseRecords),
}
