"""Replicas that poison what they give to their partners, for measuring what the defence of the average is worth.

They know everything: the weights of all honest replicas, and the radius that those clip to. Each keeps its own φ at
the honest mean, so that nothing but its poison tells it apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from node.model.replica import Replica
from node.rounds.defence import blocks_of
from protocol.run.manifest import Manifest

Kind: TypeAlias = Literal["sign-flip", "noise", "constant", "collusion", "inner-product"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BELOW_RADIUS = 0.95  # how near to the radius a tuned attacker dares to go
Honest: TypeAlias = Callable[[], Sequence[Replica]]


@dataclass(frozen=True)
class Attack:
    """What to send instead of Δ. All attackers of a run share it, and so its seed.

    sign-flip      the negative of what its own training found
    noise          Gaussian, fresh in each round
    constant       every entry alike
    collusion      one direction for all attackers and rounds, in each entry in proportion to how much the honest
                   differ there (Baruch et al., "A little is enough", arXiv 1902.06156)
    inner-product  the negative of the honest mean progress (Xie et al., "Fall of empires", arXiv 1903.03936)

    `strength` is its length in lengths of the attacker's own Δ, and below 0 the other way round. With `clip` above 0
    the attacker is tuned instead: it sends the honest mean and as much poison as passes, in each block, for a radius
    of `clip` honest distances.
    """

    kind: Kind
    strength: float = 10.0
    clip: float = 0.0
    seed: int = 0


class Attacker(Replica):
    """Trains like any other, so that it has a Δ; tells partners something else.

    Mutable state beyond a replica's: the poisoned θ and the inner step that it was made at.
    """

    def __init__(
        self,
        manifest: Manifest,
        stage_index: int,
        device: str = "cpu",
        *,
        attack: Attack,
        honest: Honest,
        number: int = 0,
    ) -> None:
        """`number` tells the attackers of a run apart: what is random is drawn by each for itself."""
        super().__init__(manifest, stage_index, device)
        self._attack = attack
        self._honest = honest  # the honest replicas of this stage, never empty
        self._common = self._normal(torch.Generator().manual_seed(attack.seed))
        self._fresh = torch.Generator().manual_seed((attack.seed << 32) + number + 1)
        self._told: torch.Tensor | None = None
        self._told_at = -1

    @torch.no_grad()
    def offered_theta(self, bounds: slice) -> torch.Tensor:
        """φ and the poison, the same for all pieces of a round."""
        if self._told is None or self._told_at != self.step:
            self._told, self._told_at = self._poisoned_theta(), self.step
        told: torch.Tensor = self._told[bounds]
        return told

    @torch.no_grad()
    def _finish(self, step: Callable[[], None]) -> None:
        """Go on from the honest mean: its own part in the outer step is poison."""
        super()._finish(step)
        self.phi.copy_(torch.stack([replica.phi for replica in self._honest()]).mean(0))
        self.flat.values.copy_(self.phi)
        self.delta.zero_()

    def _poisoned_theta(self) -> torch.Tensor:
        honest_z = torch.stack([replica.whole.contribution() for replica in self._honest()])
        poison = self._direction(honest_z)
        if not self._attack.clip:
            length = self._attack.strength * _length(self.flat.values - self.phi)
            return self.phi + poison * (length / _length(poison))
        z = self._just_inside(honest_z, poison)
        gamma, beta = self.whole.settings.gamma, self.whole.settings.beta
        return z.sub_(self.phi, alpha=gamma - beta).div_(beta)  # eq. (4) of node/model/outer.py for θ

    def _direction(self, honest_z: torch.Tensor) -> torch.Tensor:
        """Which way to push, [parameters] of any length; `honest_z` is [replicas, parameters]."""
        match self._attack.kind:
            case "sign-flip":
                return self.phi - self.flat.values
            case "noise":
                return self._normal(self._fresh)
            case "constant":
                return torch.ones_like(self.phi)
            case "collusion":
                return torch.mul(self._common, (honest_z - honest_z.mean(0)).square().mean(0).sqrt())
            case "inner-product":
                mean_phi = torch.stack([replica.phi for replica in self._honest()]).mean(0)
                return self.whole.settings.gamma * mean_phi - honest_z.mean(0)

    def _normal(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.parameters, generator=generator).to(self.device)

    def _just_inside(self, honest_z: torch.Tensor, poison: torch.Tensor) -> torch.Tensor:
        """The mean of honest z, and in each block poison up to the radius.

        With v the variance of honest z, two of them are √(2v) apart, and the mean is √v away from a victim: with
        poison r across it, the distance is √(v + r²).
        """
        z: torch.Tensor = honest_z.mean(0)
        reach = 2 * (BELOW_RADIUS * self._attack.clip) ** 2 - 1
        for block in blocks_of(self.flat.slices, self.whole.bounds):
            variance = (honest_z[:, block] - z[block]).square().sum(1).mean().item()
            z[block] += poison[block] * (math.sqrt(max(0.0, reach) * variance) / _length(poison[block]))
        return z


def _length(poison: torch.Tensor) -> float:
    return max(1e-30, float(torch.linalg.vector_norm(poison)))  # without progress no direction, and no poison
