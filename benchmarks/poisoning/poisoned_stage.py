"""What attackers do to the loss, with and without the defence: replicas of one stage that average in random pairs.

The replicas, their contributions, outer steps and defences are the node's own; network, routing and pairing by
handshake are left out, so that a run takes seconds. tests/swarm/test_poison.py does the same in a whole swarm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from pipelines.published import tiny_with_adamw
from torch.nn.attention import SDPBackend, sdpa_kernel

from bootstrap.inspect.observer import squared_deviation
from bootstrap.lab.simulation.attackers import Attack, Attacker
from bootstrap.lab.simulation.learning import loss_along, text_of
from node.data.batches import Batch, TrainingData
from node.model.replica import Replica
from node.rounds.defence import Defence, Examination, blocks_of
from node.storage.position import Position
from protocol.ground import PeerId
from protocol.run.manifest import Manifest

ROUND_SECONDS = 60.0  # of the clock that quarantines run by
VALIDATION_SEQUENCES = 256
HIDDEN, LAYERS, TOKENS = 32, 2, 64  # 37,024 parameters: five times faster than the tiny preset
Gradients: TypeAlias = Callable[[Sequence[Replica], Sequence[Batch]], torch.Tensor]


@dataclass(frozen=True)
class PoisonSetting:
    """One run; `attackers` of the `replicas` send poison. `clip` 0 is no defence."""

    attack: Attack | None = None
    attackers: int = 0
    replicas: int = 20
    clip: float = 0.0
    steps: int = 240
    inner_steps: int = 5
    seed: int = 0

    @property
    def manifest(self) -> Manifest:
        tiny = tiny_with_adamw()
        inner = {
            "total_steps": self.steps,
            "warmup_steps": 20,
            "learning_rate": 3e-3,
            "min_learning_rate": 3e-4,
        }
        return tiny.model_copy(
            update={
                "stages": 1,
                "model": tiny.model.model_copy(
                    update={"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "layers": LAYERS}
                ),
                "data": tiny.data.model_copy(update={"sequence_tokens": TOKENS}),
                "inner": tiny.inner.model_copy(update=inner | {"microbatches": 1, "sequences": 4}),
                "outer": tiny.outer.model_copy(update={"inner_steps": self.inner_steps, "clip": self.clip}),
            }
        )


@dataclass(frozen=True)
class PoisonOutcome:
    """Means over the honest replicas; fractions are of honest replicas' meetings with honest ones and attackers."""

    loss: float  # nats per token of the slow weights on held-out text
    spread: float
    clipped_honest: float  # of the parameters received
    clipped_attackers: float
    offences_honest: float
    offences_attackers: float
    quarantined_honest: int  # quarantines that began
    quarantined_attackers: int

    def facts(self) -> dict[str, Any]:
        return asdict(self)


class PoisonedStage:
    """Mutable state: the replicas and their defences, the rounds so far, what the defences found."""

    def __init__(self, setting: PoisonSetting, data: TrainingData) -> None:
        self._setting = setting
        self._data = data
        self._rng = random.Random(setting.seed)
        manifest = setting.manifest
        self.honest = [Replica(manifest, 0) for _ in range(setting.replicas - setting.attackers)]
        self._attackers: list[Replica] = []
        if setting.attack is not None:
            self._attackers = [
                Attacker(manifest, 0, attack=setting.attack, honest=lambda: self.honest, number=number)
                for number in range(setting.attackers)
            ]
        self._replicas = self.honest + self._attackers
        start = Position(data.identity)
        self._lines = [
            data.batches(f"seed {setting.seed}", str(number), manifest, start)
            for number in range(setting.replicas)
        ]
        first = self._replicas[0]
        self._gradients = gradients_of(first)
        blocks = blocks_of(first.flat.slices, first.whole.bounds)
        self._defences = [Defence(blocks, setting.clip) for _ in self.honest if setting.clip]
        self._round = 0
        self._findings: list[tuple[bool, Examination]] = []  # about an attacker or not

    def train(self) -> None:
        for step in range(self._setting.steps):
            self._inner_step()
            if (step + 1) % self._setting.inner_steps == 0:
                self._average()

    def _inner_step(self) -> None:
        batches = [next(line)[0] for line in self._lines]
        for replica, gradient in zip(self._replicas, self._gradients(self._replicas, batches), strict=True):
            replica.flat.gradients.copy_(gradient)
            replica.inner_step(1)

    def _average(self) -> None:
        """Random pairs of all that do not shun one another; who remains is alone."""
        told = [replica.whole.contribution() for replica in self._replicas]
        pulls = [torch.zeros_like(z) for z in told]
        for one, other in self._pairs():
            pulls[one] = self._pull(one, other, told)
            pulls[other] = self._pull(other, one, told)
        for replica, pull in zip(
            self._replicas, pulls, strict=True
        ):  # attackers last: they go on from the others
            replica.finish_round(replica.whole.contribution() + pull)
        self._round += 1

    def _pairs(self) -> list[tuple[int, int]]:
        free = list(range(len(self._replicas)))
        self._rng.shuffle(free)
        pairs = []
        while free:
            one = free.pop()
            other = next(
                (peer for peer in free if not (self._shuns(one, peer) or self._shuns(peer, one))), None
            )
            if other is not None:
                free.remove(other)
                pairs.append((one, other))
        return pairs

    def _shuns(self, one: int, other: int) -> bool:
        return one < len(self._defences) and self._defences[one].ledger.is_quarantined(
            PeerId(str(other)), self._now
        )

    def _pull(self, one: int, other: int, told: list[torch.Tensor]) -> torch.Tensor:
        if not told[other].isfinite().all():
            return torch.zeros_like(told[one])  # refused by the exchange, with or without the defence
        pull = told[other] / 2 - told[one] / 2
        if one < len(self._defences):
            replica, defence = self._replicas[one], self._defences[one]
            progress = told[one] - replica.whole.settings.gamma * replica.phi
            finding = defence.examine(PeerId(str(other)), pull, progress.__getitem__, self._now)
            self._findings.append((other >= len(self.honest), finding))
        return pull

    @property
    def _now(self) -> float:
        return self._round * ROUND_SECONDS

    def outcome(self) -> PoisonOutcome:
        losses = [loss_along([replica], self._data, VALIDATION_SEQUENCES) for replica in self.honest]
        entries = len(self.honest) * self.honest[0].parameters
        honest = [finding for is_attacker, finding in self._findings if not is_attacker]
        attackers = [finding for is_attacker, finding in self._findings if is_attacker]
        return PoisonOutcome(
            loss=sum(losses) / len(losses),
            spread=(squared_deviation([replica.phi for replica in self.honest]) / entries) ** 0.5,
            clipped_honest=_mean_of(honest, lambda finding: finding.clipped),
            clipped_attackers=_mean_of(attackers, lambda finding: finding.clipped),
            offences_honest=_mean_of(honest, lambda finding: finding.offence is not None),
            offences_attackers=_mean_of(attackers, lambda finding: finding.offence is not None),
            quarantined_honest=sum(finding.quarantined for finding in honest),
            quarantined_attackers=sum(finding.quarantined for finding in attackers),
        )


def train_poisoned(setting: PoisonSetting) -> PoisonOutcome:
    """One run from the first step to the last: about 20 s of a core as it is."""
    torch.set_num_threads(1)
    stage = PoisonedStage(setting, text_of(setting.manifest))
    stage.train()
    return stage.outcome()


def gradients_of(first: Replica) -> Gradients:
    """The gradients [replicas, parameters] of all replicas at once: small models wait for Python, not for the core.

    Only for a stage that is the whole model. `first` is any of the replicas: the module to compute with.
    """
    stage = first.stage
    names = {stage.checkpoint_name(name): name for name, _ in stage.named_parameters()}

    def loss(values: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = {names[place.name]: place.of(values) for place in first.flat.slices}
        logits = torch.func.functional_call(stage, weights, (inputs,))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    each = torch.func.vmap(torch.func.grad(loss))

    def gradients(replicas: Sequence[Replica], batches: Sequence[Batch]) -> torch.Tensor:
        values = torch.stack([replica.flat.values for replica in replicas])
        inputs, labels = (torch.stack(part) for part in zip(*batches, strict=True))
        with sdpa_kernel(SDPBackend.MATH):  # vmap would run the fused kernel once for each replica
            return torch.as_tensor(each(values, inputs, labels))

    return gradients


def _mean_of(findings: list[Examination], value: Callable[[Examination], float]) -> float:
    return sum(map(value, findings)) / len(findings) if findings else 0.0
