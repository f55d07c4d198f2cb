"""A replica: one copy of a stage with everything that training it changes; `passes` runs microbatches through it.

Synchronous and single-threaded: the compute thread calls it. Slow weights φ and outer momentum δ are float32
and fixed during a round; the fast weights θ are what the module's parameters hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from node.model.flat import FlatParameters
from node.model.outer import OuterSettings, add_weighted, contribution, outer_step
from node.model.passes import Passes
from node.model.schedule import learning_rate
from node.model.stage import Stage
from node.rounds.residual import Residual
from protocol.errors import CodecError, Refused
from protocol.manifest import Manifest

EVERYTHING = slice(None)
HEAVIEST = 4.0  # a round has at most this many times k inner steps
PIECE_PARAMETERS = 2**18  # entries of a state or gossip piece: 1 MiB of float32, a second on a slow uplink

Pieces: TypeAlias = Callable[[int, slice], torch.Tensor]  # of something [parameters]: the n-th, its entries


@dataclass(frozen=True)
class StepReport:
    """One inner step: the global gradient norm before clipping and the learning rate used."""

    step: int
    gradient_norm: float
    learning_rate: float


@dataclass(frozen=True)
class LeftRound:
    """A round that has ended but for its outer step."""

    theta: torch.Tensor  # [parameters] at its end
    weight: float


@dataclass(frozen=True)
class StageState:
    """Everything needed to go on elsewhere; all tensors flat float32 of the stage's parameter count."""

    step: int
    round: int
    phi: torch.Tensor
    theta: torch.Tensor
    delta: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor


class Replica:
    """Mutable state: θ, φ, δ, AdamW's moments, what is owed to partners, accumulated gradients, step and round."""

    def __init__(self, manifest: Manifest, stage_index: int, device: str = "cpu") -> None:
        self.manifest = manifest
        self.device = torch.device(device)
        self.stage = Stage(manifest, stage_index, initialise=manifest.start is None).to(self.device)
        self.flat = FlatParameters(
            [(self.stage.checkpoint_name(name), p) for name, p in self.stage.named_parameters()]
        )
        self.settings = OuterSettings(*manifest.outer.coefficients)
        self.phi = self.flat.values.clone()
        self.delta = torch.zeros_like(self.phi)
        self.residual = Residual(self.phi)
        self.first_moment = torch.zeros_like(self.phi)
        self.second_moment = torch.zeros_like(self.phi)
        self.step = 0  # inner steps done
        self.round = 0  # outer steps done
        self.steps_in_round = 0
        self._left: LeftRound | None = None
        self.passes = Passes(self.stage, self.device, self.slow_weights())
        self._build_optimizer()

    def slow_weights(self) -> dict[str, torch.Tensor]:
        """Views of φ by the names that the stage's module gives its parameters."""
        of_checkpoint = {place.name: place.of(self.phi) for place in self.flat.slices}
        return {
            name: of_checkpoint[self.stage.checkpoint_name(name)] for name, _ in self.stage.named_parameters()
        }

    def _build_optimizer(self) -> None:
        inner = self.manifest.inner
        groups = self.flat.groups()
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [parameter], "weight_decay": inner.weight_decay if index == 0 else 0.0}
                for index, (parameter, _) in enumerate(groups)
            ],
            lr=inner.learning_rate,
            betas=(inner.beta1, inner.beta2),
            eps=inner.eps,
            fused=True,
        )
        for parameter, place in groups:
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step), device=self.device),
                "exp_avg": self.first_moment[place],
                "exp_avg_sq": self.second_moment[place],
            }

    @property
    def parameters(self) -> int:
        return self.phi.numel()

    def inner_step(self, microbatches: int) -> StepReport:
        """AdamW on the mean gradient of `microbatches` accumulated ones, clipped over this stage.

        Non-finite gradients are dropped: the step counts, the weights stay.
        """
        gradients = self.flat.gradients
        gradients.div_(microbatches)
        norm = torch.linalg.vector_norm(gradients).item()
        rate = learning_rate(self.manifest.inner, self.step)
        if norm == norm and norm != float("inf"):
            if norm > self.manifest.inner.clip_norm:
                gradients.mul_(self.manifest.inner.clip_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        gradients.zero_()
        self.step += 1
        self.steps_in_round += 1
        return StepReport(self.step, norm, rate)

    def rehearse_step(self) -> None:
        """An inner step that changes nothing but takes all the memory that steps and rounds will: before training."""
        self.flat.gradients.zero_()
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        self.delta.zero_()  # zeros are given by the system when they are first touched
        self._set_optimizer_step()

    def offered_phi(self, bounds: slice) -> torch.Tensor:
        """φ over `bounds` as partners are told it. With `offered_theta`, all that a contribution is made from."""
        return self.phi[bounds]

    def offered_theta(self, bounds: slice) -> torch.Tensor:
        """θ over `bounds` as partners are told it: at the end of the round."""
        theta = self.flat.values if self._left is None else self._left.theta
        return theta[bounds]

    def offered_progress(self, bounds: slice) -> torch.Tensor:
        """w·Δ over `bounds`, w the `weight` of this round."""
        progress = self.offered_theta(bounds) - self.offered_phi(bounds)
        return progress if self.weight == 1.0 else progress.mul_(self.weight)

    @property
    def weight(self) -> float:
        """w of this replica's progress: 1, or with the weighting "tokens" the round's tokens by those of k steps.

        The mean weight over a stage is then about 1, and partners need not tell each other.
        """
        outer = self.manifest.outer
        if self._left is not None:
            return self._left.weight
        if outer.weighting == "equal" or not self.steps_in_round:
            return 1.0
        return min(HEAVIEST, self.steps_in_round / outer.inner_steps)

    def contribution(self, bounds: slice = EVERYTHING, is_alone: bool = False) -> torch.Tensor:
        """z = β·w·θ + (γ − β·w)·φ over `bounds`: the one tensor that partners exchange; w is 1 in a group of one."""
        weight = 1.0 if is_alone else self.weight
        settings = replace(self.settings, beta=self.settings.beta * weight)
        return contribution(self.offered_theta(bounds), self.offered_phi(bounds), settings)

    def _add_contribution(self, target: torch.Tensor, bounds: slice) -> torch.Tensor:
        """target ← target + z over `bounds`, without memory for z."""
        gain, gamma = self.settings.beta * self.weight, self.settings.gamma
        return add_weighted(target, self.offered_theta(bounds), gain, self.offered_phi(bounds), gamma - gain)

    def leave_round(self, memory: torch.Tensor) -> None:
        """Begin the next round before this one's outer step is taken: what is offered stays as it is at this moment.

        `memory` [parameters] holds it until then.
        """
        weight = self.weight
        memory.copy_(self.flat.values)
        self._left = LeftRound(memory, weight)
        self.steps_in_round = 0

    def finish_round(self, mean_z: torch.Tensor) -> None:
        """The NoLoCo outer step with a group's mean of z, [parameters]. θ starts again from φ."""
        self._finish(lambda _, bounds: mean_z[bounds])

    def finish_round_with(self, pull: Pieces) -> None:
        """The outer step of a pair: own z and pull make its mean, see `averaging`; the pull is written over."""
        self._finish(lambda index, bounds: self._add_contribution(pull(index, bounds), bounds))

    def finish_round_alone(self) -> None:
        """The outer step of a group of one."""
        self._finish(lambda _, bounds: self.contribution(bounds, is_alone=True))

    @torch.no_grad()
    def _finish(self, mean_z: Pieces) -> None:
        """After `leave_round` the step comes late: θ keeps what it has gained since then."""
        values, left = self.flat.values, self._left
        for index in range(self.pieces):  # a piece at a time stays in the cache
            bounds = self.piece_bounds(index)
            outer_step(self.phi[bounds], self.delta[bounds], mean_z(index, bounds), self.settings)
            if left is None:
                values[bounds].copy_(self.phi[bounds])
            else:
                values[bounds].sub_(left.theta[bounds]).add_(self.phi[bounds])
        self.round += 1
        self._left = None
        if left is None:
            self.steps_in_round = 0

    def piece_bounds(self, index: int) -> slice:
        start = index * PIECE_PARAMETERS
        if start >= self.parameters:
            raise Refused("no-such-piece", f"this stage has {self.pieces} pieces")
        return slice(start, min(start + PIECE_PARAMETERS, self.parameters))

    @property
    def pieces(self) -> int:
        return -(-self.parameters // PIECE_PARAMETERS)

    def read_piece(self, index: int, moments: bool) -> list[torch.Tensor]:
        """Copies of φ, and with `moments` also δ and AdamW's moments, over one piece."""
        bounds = self.piece_bounds(index)
        sources = [self.phi, self.delta, self.first_moment, self.second_moment] if moments else [self.phi]
        return [source[bounds].to("cpu", copy=True) for source in sources]

    def write_piece(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Take over a donor's piece; θ starts from its φ."""
        bounds = self.piece_bounds(index)
        targets = [self.phi, self.delta, self.first_moment, self.second_moment]
        if len(tensors) != len(targets) or any(t.shape != self.phi[bounds].shape for t in tensors):
            raise CodecError("a state piece does not have the shape of this stage")
        for target, tensor in zip(targets, tensors, strict=True):
            target[bounds].copy_(tensor)
        self.flat.values[bounds].copy_(tensors[0])

    def adopt(self, pieces: dict[int, list[torch.Tensor]], step: int, round_: int) -> None:
        """After a download of all pieces: continue from them and from the donor's count of steps and rounds."""
        for index, tensors in pieces.items():
            self.write_piece(index, tensors)
        self.step, self.round, self.steps_in_round, self._left = step, round_, 0, None
        self.residual.clear()
        self._set_optimizer_step()

    @torch.no_grad()
    def begin_with(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start from these weights, every one of the stage's by its name in a checkpoint, whatever was there."""
        places = {place.name: place for place in self.flat.slices}
        for name, tensor in weights:
            places.pop(name).of(self.flat.values).copy_(tensor)
        assert not places, f"no weights for {list(places)}"
        self.phi.copy_(self.flat.values)

    def snapshot(self) -> StageState:
        tensors = (self.phi, self.flat.values, self.delta, self.first_moment, self.second_moment)
        return StageState(self.step, self.round, *(tensor.to("cpu", copy=True) for tensor in tensors))

    def restore(self, state: StageState) -> None:
        """Take over a snapshot of the same stage. Raises `CodecError` when its size is another."""
        for tensor in (state.phi, state.theta, state.delta, state.first_moment, state.second_moment):
            if tensor.shape != self.phi.shape:
                raise CodecError(f"the state has {tensor.numel()} parameters, this stage {self.parameters}")
        self.phi.copy_(state.phi)
        self.flat.values.copy_(state.theta)
        self.delta.copy_(state.delta)
        self.first_moment.copy_(state.first_moment)
        self.second_moment.copy_(state.second_moment)
        self.step, self.round, self.steps_in_round, self._left = state.step, state.round, 0, None
        self.residual.clear()
        self._set_optimizer_step()

    def _set_optimizer_step(self) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(float(self.step))


def digest_of(tensors: list[torch.Tensor]) -> bytes:
    """SHA-256 over the bytes of contiguous CPU tensors, one after another."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.numpy().data.cast("B"))
    return sha.digest()
