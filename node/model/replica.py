"""A replica: one copy of a stage with everything that training it changes; `passes` runs microbatches through it.

Synchronous and single-threaded: the compute thread calls it. Slow weights φ and outer momentum δ are float32
and fixed during a round; the fast weights θ are what the module's parameters hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import torch

from node.model.flat import FlatParameters
from node.model.fragment import Fragment, PairPull, Weights, fragments_of
from node.model.inner import (
    LARGEST_NORM,
    InnerOptimizer,
    LeftOut,
    StepReport,
    are_finite,
    learning_rate,
    norm_of,
)
from node.model.outer import OuterSettings, load_fused
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
        settings = OuterSettings(*manifest.outer.coefficients, kept_apart(manifest.wire.gossip))
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
        # what rounds average: all of it, or one of the fragments after the other
        self.whole = self._fragment(slice(0, self.parameters), settings)
        bounds_of_all = fragments_of(self.parameters, manifest.outer.fragments)
        self.fragments = (
            [self._fragment(bounds, settings) for bounds in bounds_of_all]
            if len(bounds_of_all) > 1
            else [self.whole]
        )
        self._void_steps = 0  # whose batches began at weights that were replaced since
        self._ran_before = False  # passes ran in the step before this one, with staleness some of this one's

    def _fragment(self, bounds: slice, settings: OuterSettings) -> Fragment:
        weights = Weights(self.flat.values, self.phi, self.delta)
        return Fragment(weights, bounds, self.flat.slices, lambda at: self.offered_theta(at), settings)

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
        rate = learning_rate(inner, self.run_step)
        norm, left_out = self._judged(gradients)
        norm /= microbatches
        if not left_out and norm > LARGEST_NORM:
            left_out = "absurd"
        if not left_out:
            # the mean, clipped, in one pass
            gradients.mul_(min(1.0, inner.clip_norm / norm if norm else 1.0) / microbatches)
            self.snapshots.before_change("theta", "first_moment", "second_moment")
            left_out = "" if self.optimizer.update(rate) else "memory"
        self.passes.weights_changed()
        self._ran_before, self._void_steps = self.passes.has_run, max(0, self._void_steps - 1)
        self.forget_gradients()
        self.step += 1
        self.steps_in_round += 1
        return StepReport(self.step, norm, rate, left_out)

    def _judged(self, gradients: torch.Tensor) -> tuple[float, LeftOut]:
        """Return the norm of the gradients' sum, and why they are not to be learned from, if they are not."""
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
        return norm, ""

    def forget_gradients(self) -> None:
        """Begin a batch, as if no pass had run."""
        self.flat.gradients.zero_()
        self.passes.gradients_forgotten()

    def dry_run_step(self) -> None:
        """Take all the memory that steps and rounds will, in an inner step that changes nothing: before training."""
        self.flat.gradients.zero_()
        self.optimizer.dry_run()
        if self.whole.steps_at_once and self.passes.execution.compiles:
            load_fused(self.device, has_fragments=self.fragments != [self.whole])
            for fragment in {*self.fragments, self.whole}:
                fragment.compiles = True
        if self.whole.settings.kept_apart:
            lattice.load()
        self.delta.zero_()  # zeros are given by the system when they are first touched

    def offered_theta(self, bounds: slice) -> torch.Tensor:
        """θ over `bounds` as partners are told it: at the end of the round."""
        return self.flat.values[bounds]

    def fragment_of(self, index: int | None) -> Fragment:
        """One of the fragments; None is all of them at once."""
        return self.whole if index is None else self.fragments[index]

    def finish_round(self, mean_z: torch.Tensor) -> None:
        """Take the outer step with a group's mean of z, [parameters]. θ starts again from φ."""
        self._finish(lambda: self.whole.step_to(mean_z))

    def finish_round_with(self, own: Fragment, pull: PairPull) -> None:
        """Take the outer step of a pair over one of the fragments, or over the whole: see `Fragment.step_with`."""
        self._finish(lambda: own.step_with(pull))

    def finish_round_alone(self, own: Fragment) -> None:
        """Take the outer step of a group of one over one of the fragments, or over the whole."""
        self._finish(own.step_alone)

    def _finish(self, step: Callable[[], None]) -> None:
        self.snapshots.before_change("theta", "phi", "delta")
        step()
        self.passes.weights_changed()
        self.round += 1
        self.steps_in_round = 0

    def settle(self) -> None:
        """Take a round alone over what no round has averaged since the last inner step, so that θ and φ are one.

        It counts as a round: whoever asks for pieces of one round must not get φ of before and of after it.
        """
        if self.fragments != [self.whole]:
            self.finish_round_alone(self.whole)

    def lengthen(self, factor: float) -> None:
        """Let the own progress count `factor` times what the run's β says, in each fragment."""
        for fragment in {*self.fragments, self.whole}:
            fragment.lengthen(factor)

    def stop_momentum(self) -> None:
        """Forget δ: the next outer step averages φ and goes no further, where nothing was trained before it."""
        self.snapshots.before_change("delta")
        self.delta.zero_()

    def read_piece(self, index: int, moments: bool) -> list[torch.Tensor]:
        """Copies of φ, and with `moments` also δ and AdamW's moments, over one piece. Raises `Refused`."""
        bounds = self.whole.piece_bounds(index)
        if self.is_blank:
            raise Refused("no-weights", "this replica has no weights yet")
        sources = [self.phi, self.delta, *self.optimizer.moments] if moments else [self.phi]
        if not are_finite(source[bounds] for source in sources):
            raise Refused("not-finite", "this replica's weights hold NaN or infinity")
        return [_on_host(source[bounds]) for source in sources]

    def read_saved_piece(self, index: int) -> tuple[StageState, list[torch.Tensor]] | None:
        """A piece of the last snapshot, and whose it is, while φ is still as it was then. From any thread."""
        return self.snapshots.read(self.round, self.whole.piece_bounds(index))

    def is_finite(self) -> bool:
        """Return whether all that the replica holds is finite; takes a pass over each tensor, and no memory."""
        return are_finite((self.flat.values, self.phi, self.delta, *self.optimizer.moments))

    def write_piece(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Take over a donor's piece; θ starts from its φ."""
        bounds = self.whole.piece_bounds(index)
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
