"""A replica: one copy of a stage with everything that training it changes; `passes` runs microbatches through it.

Synchronous and single-threaded: the compute thread calls it. Slow weights φ and outer momentum δ are float32
and fixed during a round; the fast weights θ are what the module's parameters hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from node.model.flat import FlatParameters
from node.model.inner import (
    LARGEST_NORM,
    InnerOptimizer,
    LeftOut,
    StepReport,
    are_finite,
    learning_rate,
    norm_of,
)
from node.model.outer import (
    OuterSettings,
    add_weighted,
    contribution,
    fused_on,
    outer_step,
    outer_step_at_once,
)
from node.model.passes import Passes
from node.model.resources import is_out_of_memory, retried
from node.model.run_clock import RunClock
from node.model.snapshot import Snapshots, copier_of
from node.model.stage import Stage
from node.storage.stage_state import StageState
from protocol.codecs import lattice
from protocol.codecs.near_codecs import kept_apart
from protocol.errors import CodecError, Refused
from protocol.records.lineage import UNDATED, Lineage
from protocol.run.manifest import Manifest
from protocol.windows import counted, window

EVERYTHING = slice(None)
PIECES_AT_ONCE = 16  # that are encoded and read in one go where steps are taken so: each launch has its price
PIECE_PARAMETERS = 2**18  # entries of a state or gossip piece: 1 MiB of float32, a second on a slow uplink

Pieces: TypeAlias = Callable[[int, slice], torch.Tensor]  # of something [parameters]: the n-th, its entries


class Replica:
    """One copy of a stage: its weights and everything that training changes."""

    def __init__(self, manifest: Manifest, stage_index: int, device: str = "cpu") -> None:
        self.manifest = manifest
        self.device = torch.device(device)
        # True until it has the weights of a run that starts from a checkpoint; others are made from the seed here
        self.is_blank = manifest.start is not None
        self.stage = Stage(manifest, stage_index, initialise=not self.is_blank).to(self.device)
        self.flat = FlatParameters(
            [(self.stage.checkpoint_name(name), p) for name, p in self.stage.named_parameters()]
        )
        if self.is_blank:
            self.flat.make_blank()
        self._founded = OuterSettings(*manifest.outer.coefficients, kept_apart(manifest.wire.gossip))
        self.settings = self._founded
        self.phi = self.flat.values.clone()
        self.delta = torch.zeros_like(self.phi)
        self.optimizer = InnerOptimizer(manifest.inner, self.flat)
        self.step = 0  # batches taken, those that were left out as well: data go by it
        self.clock = RunClock(manifest.inner.total_steps)
        self.round = 0  # outer steps done
        self.steps_in_round = 0
        self.lineage = UNDATED  # which beginning the weights come from
        self.passes = Passes(self.stage, self.device, self.slow_weights())
        self.snapshots = Snapshots(self.state, copier_of(self.device))
        # outer steps: in one launch, as a GPU is quickest, or a piece at a time, which stays in a processor's cache
        self.steps_at_once = self.device.type != "cpu"
        self._void_steps = 0  # whose batches began at weights that were replaced since
        self._ran_before = False  # passes ran in the step before this one, with staleness some of this one's

    @window
    def __repr__(self) -> str:
        stage, size = self.stage.index, f"{self.parameters:,} parameters on {self.device}"
        at = f"{self.step} | Round: {self.round}, {counted(self.steps_in_round, 'step')} in"
        return f"Stage: {stage} of {self.manifest.stages} | {size} | Step: {at}"

    def slow_weights(self) -> dict[str, torch.Tensor]:
        """Views of φ by the names that the stage's module gives its parameters."""
        return self.named(self.phi)

    def named(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of all parameters' `values`, [parameters], by the names that the stage's module gives them."""
        of_checkpoint = {place.name: place.of(values) for place in self.flat.slices}
        return {
            name: of_checkpoint[self.stage.checkpoint_name(name)] for name, _ in self.stage.named_parameters()
        }

    @property
    def parameters(self) -> int:
        return self.phi.numel()

    @property
    def run_step(self) -> int:
        """The run's step, which the learning rate goes by: `step`, where no microbatch brought another."""
        return self.clock.step(self.step)

    def inner_step(self, microbatches: int) -> StepReport:
        """Take a step of AdamW on the mean gradient of `microbatches` accumulated ones, clipped over this stage.

        A batch that is left out counts as a step (`step`, the learning rate, the data and the round go on) but not as
        an update of AdamW, whose bias correction must know how many gradients its moments are made of.
        """
        gradients, inner = self.flat.gradients, self.manifest.inner
        gradients.div_(microbatches)
        rate = learning_rate(inner, self.run_step)
        norm, left_out = self._judged(gradients)
        if not left_out:
            if norm > inner.clip_norm:
                gradients.mul_(inner.clip_norm / norm)
            self.snapshots.before_change("theta", "first_moment", "second_moment")
            left_out = "" if self.optimizer.update(rate) else "memory"
        self.passes.weights_changed()
        self._ran_before, self._void_steps = self.passes.has_run, max(0, self._void_steps - 1)
        self.forget_gradients()
        self.step += 1
        self.steps_in_round += 1
        return StepReport(self.step, norm, rate, left_out)

    def _judged(self, gradients: torch.Tensor) -> tuple[float, LeftOut]:
        """Return the norm of the gradients, and why they are not to be learned from, if they are not."""
        if self._void_steps:
            return math.nan, "replaced"
        if self.passes.is_spoiled:
            return math.nan, "memory"
        try:
            norm = retried(norm_of, gradients)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return math.nan, "memory"
        if not math.isfinite(norm):
            return norm, "non-finite"
        return norm, "absurd" if norm > LARGEST_NORM else ""

    def forget_gradients(self) -> None:
        """Begin a batch, as if no pass had run."""
        self.flat.gradients.zero_()
        self.passes.gradients_forgotten()

    def dry_run_step(self) -> None:
        """Take all the memory that steps and rounds will, in an inner step that changes nothing: before training."""
        self.flat.gradients.zero_()
        self.optimizer.dry_run()
        if self.steps_at_once:
            fused_on(self.device)
        if self.settings.kept_apart:
            lattice.load()
        self.delta.zero_()  # zeros are given by the system when they are first touched

    def offered_phi(self, bounds: slice) -> torch.Tensor:
        """φ over `bounds` as partners are told it. With `offered_theta`, all that a contribution is made from."""
        return self.phi[bounds]

    def offered_theta(self, bounds: slice) -> torch.Tensor:
        """θ over `bounds` as partners are told it: at the end of the round."""
        return self.flat.values[bounds]

    def offered_progress(self, bounds: slice) -> torch.Tensor:
        """Δ over `bounds`."""
        return self.offered_theta(bounds) - self.offered_phi(bounds)

    def contribution(self, bounds: slice = EVERYTHING) -> torch.Tensor:
        """z = β·θ + (γ − β)·φ over `bounds`: the one tensor that partners exchange."""
        return contribution(self.offered_theta(bounds), self.offered_phi(bounds), self.settings)

    def _add_contribution(self, target: torch.Tensor, bounds: slice) -> torch.Tensor:
        """target ← target + z over `bounds`, without memory for z."""
        gain, gamma = self.settings.beta, self.settings.gamma
        return add_weighted(target, self.offered_theta(bounds), gain, self.offered_phi(bounds), gamma - gain)

    def finish_round(self, mean_z: torch.Tensor) -> None:
        """Take the NoLoCo outer step with a group's mean of z, [parameters]. θ starts again from φ."""
        if self.steps_at_once:
            self._finish_at_once(mean_z.to(self.device), 0.0, -self.settings.gamma)
        else:
            self._finish(lambda _, bounds: mean_z[bounds])

    def finish_round_with(self, pull: Pieces, whole: Callable[[], torch.Tensor] | None = None) -> None:
        """Take the outer step of a pair: own z and pull make its mean, see `Pull`; the pull is written over.

        `whole` gives all of the pull, for a device that has memory for it.
        """
        if self.steps_at_once and whole is not None:
            try:
                pull_of_all = retried(whole)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                gain = self.settings.beta
                self._finish_at_once(pull_of_all, gain, -gain)
                return
        self._finish(lambda index, bounds: self._add_contribution(pull(index, bounds), bounds))

    def finish_round_alone(self) -> None:
        """Take the outer step of a group of one, whose mean is as long as its own progress."""
        self.lengthen(1.0)
        if self.steps_at_once:
            self._finish_at_once(None, self.settings.beta, -self.settings.beta)
        else:
            self._finish(lambda _, bounds: self.contribution(bounds))

    def lengthen(self, factor: float) -> None:
        """Let the own progress count `factor` times what the run's β says, until this is called again."""
        self.settings = replace(self._founded, beta=self._founded.beta * factor)

    def stop_momentum(self) -> None:
        """Forget δ: the next outer step averages φ and goes no further, where nothing was trained before it."""
        self.snapshots.before_change("delta")
        self.delta.zero_()

    def _finish_at_once(self, added: torch.Tensor | None, by_theta: float, by_phi: float) -> None:
        self.snapshots.before_change("theta", "phi", "delta")
        weights = self.settings.alpha, by_theta, by_phi
        outer_step_at_once(self.phi, self.delta, self.flat.values, added, weights)
        self._round_ended()

    @torch.no_grad()
    def _finish(self, mean_z: Pieces) -> None:
        self.snapshots.before_change("theta", "phi", "delta")
        for index in range(self.pieces):  # a piece at a time stays in the cache
            bounds = self.piece_bounds(index)
            self._step_piece(lambda index=index, bounds=bounds: mean_z(index, bounds), bounds)  # type: ignore[misc]
            self.flat.values[bounds].copy_(self.phi[bounds])
        self._round_ended()

    def _round_ended(self) -> None:
        self.passes.weights_changed()
        self.round += 1
        self.steps_in_round = 0

    def _step_piece(self, mean_z: Callable[[], torch.Tensor], bounds: slice) -> None:
        """Take the outer step over one piece; without memory for the mean, as a group of one, in place."""
        phi, delta = self.phi[bounds], self.delta[bounds]
        try:
            mean = retried(mean_z)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            theta, beta = self.flat.values[bounds], self._founded.beta
            delta.mul_(self.settings.alpha).add_(theta, alpha=beta).sub_(phi, alpha=beta)
            phi.add_(delta)
        else:
            outer_step(phi, delta, mean, self.settings)

    def piece_bounds(self, index: int) -> slice:
        start = index * PIECE_PARAMETERS
        if start >= self.parameters:
            raise Refused("no-such-piece", f"this stage has {self.pieces} pieces")
        return slice(start, min(start + PIECE_PARAMETERS, self.parameters))

    @property
    def piece_parameters(self) -> int:
        """Entries of a piece but the last."""
        return PIECE_PARAMETERS

    @property
    def pieces(self) -> int:
        return -(-self.parameters // PIECE_PARAMETERS)

    def in_groups(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Pieces that follow one another in groups that are worked on together: on a GPU, several."""
        size = PIECES_AT_ONCE if self.steps_at_once else 1
        return [indices[first : first + size] for first in range(0, len(indices), size)]

    def bounds_of(self, indices: Sequence[int]) -> slice:
        """The entries of pieces that follow one another. Raises `Refused`."""
        return slice(self.piece_bounds(indices[0]).start, self.piece_bounds(indices[-1]).stop)

    def read_piece(self, index: int, moments: bool) -> list[torch.Tensor]:
        """Copies of φ, and with `moments` also δ and AdamW's moments, over one piece. Raises `Refused`."""
        bounds = self.piece_bounds(index)
        if self.is_blank:
            raise Refused("no-weights", "this replica has no weights yet")
        sources = [self.phi, self.delta, *self.optimizer.moments] if moments else [self.phi]
        if not are_finite(source[bounds] for source in sources):
            raise Refused("not-finite", "this replica's weights hold NaN or infinity")
        return [_on_host(source[bounds]) for source in sources]

    def read_saved_piece(self, index: int) -> tuple[StageState, list[torch.Tensor]] | None:
        """A piece of the last snapshot, and whose it is, while φ is still as it was then. From any thread."""
        return self.snapshots.read(self.round, self.piece_bounds(index))

    def is_finite(self) -> bool:
        """Return whether all that the replica holds is finite; takes a pass over each tensor, and no memory."""
        return are_finite((self.flat.values, self.phi, self.delta, *self.optimizer.moments))

    def write_piece(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Take over a donor's piece; θ starts from its φ."""
        bounds = self.piece_bounds(index)
        self.snapshots.forget()
        targets = [self.phi, self.delta, *self.optimizer.moments]
        if len(tensors) != len(targets) or any(t.shape != self.phi[bounds].shape for t in tensors):
            raise CodecError("a state piece does not have the shape of this stage")
        for target, tensor in zip(targets, tensors, strict=True):
            target[bounds].copy_(tensor)
        self.flat.values[bounds].copy_(tensors[0])
        self.passes.weights_changed()

    def adopt(
        self, pieces: dict[int, list[torch.Tensor]], step: int, round_: int, lineage: Lineage = UNDATED
    ) -> None:
        """Continue from a download of all pieces, and from the donors' count of steps and rounds and their lineage.

        AdamW's updates are taken to be the donor's steps: donors do not tell how many of them were left out.
        """
        for index, tensors in pieces.items():
            self.write_piece(index, tensors)
        self.lineage = lineage
        self._begin_anew(step, round_, updates=step)

    def _begin_anew(self, step: int, round_: int, updates: int) -> None:
        """Forget all of the state before, and its gradients.

        Microbatches that have run forward with the old weights still come back: their batches are left out.
        """
        self.is_blank = False
        self.step, self.round, self.steps_in_round = step, round_, 0
        self.clock = RunClock(self.manifest.inner.total_steps)
        self.optimizer.updates = updates
        staleness = self.manifest.inner.staleness
        are_under_way = self.passes.has_run or (staleness > 0 and self._ran_before)
        self._void_steps = (1 + staleness) * are_under_way
        self._ran_before = False
        self.forget_gradients()

    @torch.no_grad()
    def begin_with(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start from these weights, every one of the stage's by its name in a checkpoint, whatever was there."""
        self.snapshots.forget()
        places = {place.name: place for place in self.flat.slices}
        for name, tensor in weights:
            places.pop(name).of(self.flat.values).copy_(tensor)
        assert not places, f"no weights for {list(places)}"
        self.phi.copy_(self.flat.values)
        self.passes.weights_changed()
        self.is_blank = False

    def state(self) -> StageState:
        """Everything that the next inner step, and the outer step of this round, depend on; it goes on changing.

        The gradients of the batch that is under way are left out: its microbatches are drawn again.
        """
        first, second = self.optimizer.moments
        return StageState(
            self.step,
            self.round,
            self.steps_in_round,
            self.optimizer.updates,
            phi=self.phi,
            theta=self.flat.values,
            delta=self.delta,
            first_moment=first,
            second_moment=second,
            lineage=self.lineage,
        )

    def restore(self, state: StageState) -> None:
        """Take over a snapshot of the same stage. Raises `CodecError` when its size is another."""
        for tensor in state.tensors().values():
            if tensor.shape != self.phi.shape:
                raise CodecError(f"the state has {tensor.numel()} parameters, this stage {self.parameters}")
        self.snapshots.forget()
        for name, target in self.state().tensors().items():
            target.copy_(state.tensors()[name])
        self.passes.weights_changed()
        self._begin_anew(state.step, state.round, state.updates)
        self.steps_in_round, self.lineage = state.steps_in_round, state.lineage


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def digest_of(tensors: list[torch.Tensor]) -> bytes:
    """SHA-256 over the bytes of contiguous CPU tensors, one after another."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.numpy().data.cast("B"))
    return sha.digest()
