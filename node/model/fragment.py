"""A fragment of a replica: contiguous parameters that a round averages by themselves; or all of them, the whole.

With `outer.fragments` above one each round averages one fragment, each time with another partner, as Streaming
DiLoCo synchronises fragments in turn (Douillard et al., arXiv 2501.18512): as many bytes, in smaller exchanges, and
what one replica has learned reaches the others sooner.

Synchronous and single-threaded, as the replica is, whose tensors these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from node.model.flat import Slice
from node.model.outer import OuterSettings, add_weighted, contribution, outer_step, outer_step_at_once
from node.model.resources import is_out_of_memory, retried
from protocol.codecs.kernels import BLOCK
from protocol.errors import Refused

EVERYTHING = slice(None)
PIECES_AT_ONCE = 16  # that are encoded and read in one go where steps are taken so: each launch has its price
PIECE_PARAMETERS = 2**18  # entries of a state or gossip piece: 1 MiB of float32, a second on a slow uplink

Pieces: TypeAlias = Callable[[int, slice], torch.Tensor]  # of something [parameters]: the n-th, its entries


def fragments_of(parameters: int, count: int) -> list[slice]:
    """The bounds of `count` fragments, each beginning with a block and all but the last of one size.

    They are fewer where as many blocks each are too many: 64 of 65 blocks would be 33 of two.
    """
    blocks = -(-parameters // BLOCK)
    size = -(-blocks // min(count, blocks)) * BLOCK
    return [slice(start, min(start + size, parameters)) for start in range(0, parameters, size)]


@dataclass(frozen=True)
class Weights:
    """The flat tensors of a replica that a round changes, each [parameters]."""

    theta: torch.Tensor
    phi: torch.Tensor
    delta: torch.Tensor


class Fragment:
    """What rounds see of some parameters of a replica: what partners are offered of them, and their outer step.

    Bounds and pieces count from the fragment's own beginning. Mutable state: `settings`, by which the own progress
    counts as much as it does now.
    """

    def __init__(
        self,
        weights: Weights,
        bounds: slice,
        slices: Sequence[Slice],
        offered_theta: Callable[[slice], torch.Tensor],
        settings: OuterSettings,
    ) -> None:
        """`offered_theta` gives θ as partners are told it, over bounds of the whole replica."""
        self.bounds = bounds
        self.theta, self.phi, self.delta = (
            tensor[bounds] for tensor in (weights.theta, weights.phi, weights.delta)
        )
        self.slices = slices  # the places of the replica's parameters
        self._offered_theta = offered_theta
        self._founded = settings
        self.settings = settings
        # outer steps: in one launch, as a GPU is quickest, or a piece at a time, which stays in a processor's cache
        self.steps_at_once = self.phi.device.type != "cpu"
        self.compiles = False  # whether the one launch was compiled, or many do it

    def __repr__(self) -> str:
        return f"<Fragment of {self.parameters:,} parameters from {self.bounds.start:,} on>"

    @property
    def parameters(self) -> int:
        return self.phi.numel()

    @property
    def device(self) -> torch.device:
        return self.phi.device

    # --- what partners are offered ------------------------------------------------------------

    def offered_phi(self, bounds: slice) -> torch.Tensor:
        """φ over `bounds` as partners are told it. With `offered_theta`, all that a contribution is made from."""
        return self.phi[bounds]

    def offered_theta(self, bounds: slice) -> torch.Tensor:
        """θ over `bounds` as partners are told it: at the end of the round."""
        first, (start, stop, _) = self.bounds.start, bounds.indices(self.parameters)
        return self._offered_theta(slice(first + start, first + stop))

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

    def lengthen(self, factor: float) -> None:
        """Let the own progress count `factor` times what the run's β says, until this is called again."""
        self.settings = replace(self._founded, beta=self._founded.beta * factor)

    # --- the outer step -----------------------------------------------------------------------

    def step_to(self, mean_z: torch.Tensor) -> None:
        """Take the outer step with a group's mean of z, [parameters]. θ starts again from φ."""
        if self.steps_at_once:
            self._step_at_once(mean_z.to(self.device), 0.0, -self.settings.gamma)
        else:
            self._step_in_pieces(lambda _, bounds: mean_z[bounds])

    def step_with(self, pull: Pieces, whole: Callable[[], torch.Tensor] | None = None) -> None:
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
                self._step_at_once(pull_of_all, gain, -gain)
                return
        self._step_in_pieces(lambda index, bounds: self._add_contribution(pull(index, bounds), bounds))

    def step_alone(self) -> None:
        """Take the outer step of a group of one, whose mean is as long as its own progress."""
        self.lengthen(1.0)
        if self.steps_at_once:
            self._step_at_once(None, self.settings.beta, -self.settings.beta)
        else:
            self._step_in_pieces(lambda _, bounds: self.contribution(bounds))

    def _step_at_once(self, added: torch.Tensor | None, by_theta: float, by_phi: float) -> None:
        weights = self.settings.alpha, by_theta, by_phi
        outer_step_at_once(self.phi, self.delta, self.theta, added, weights, self.compiles)

    @torch.no_grad()
    def _step_in_pieces(self, mean_z: Pieces) -> None:
        for index in range(self.pieces):  # a piece at a time stays in the cache
            bounds = self.piece_bounds(index)
            self._step_piece(lambda index=index, bounds=bounds: mean_z(index, bounds), bounds)  # type: ignore[misc]
            self.theta[bounds].copy_(self.phi[bounds])

    def _step_piece(self, mean_z: Callable[[], torch.Tensor], bounds: slice) -> None:
        """Take the outer step over one piece; without memory for the mean, as a group of one, in place."""
        phi, delta = self.phi[bounds], self.delta[bounds]
        try:
            mean = retried(mean_z)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            theta, beta = self.theta[bounds], self._founded.beta
            delta.mul_(self.settings.alpha).add_(theta, alpha=beta).sub_(phi, alpha=beta)
            phi.add_(delta)
        else:
            outer_step(phi, delta, mean, self.settings)

    # --- pieces -------------------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        return -(-self.parameters // PIECE_PARAMETERS)

    @property
    def piece_parameters(self) -> int:
        """Entries of a piece but the last."""
        return PIECE_PARAMETERS

    def piece_bounds(self, index: int) -> slice:
        """The entries of a piece. Raises `Refused`."""
        start = index * PIECE_PARAMETERS
        if start >= self.parameters:
            raise Refused("no-such-piece", f"this stage has {self.pieces} pieces")
        return slice(start, min(start + PIECE_PARAMETERS, self.parameters))

    def bounds_of(self, indices: Sequence[int]) -> slice:
        """The entries of pieces that follow one another. Raises `Refused`."""
        return slice(self.piece_bounds(indices[0]).start, self.piece_bounds(indices[-1]).stop)

    def in_groups(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Pieces that follow one another in groups that are worked on together: on a GPU, several."""
        size = PIECES_AT_ONCE if self.steps_at_once else 1
        return [indices[first : first + size] for first in range(0, len(indices), size)]
