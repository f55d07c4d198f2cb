"""A fragment of a replica: contiguous parameters that a round averages by themselves; or all of them, the whole.

With `outer.fragments` above one each round averages one fragment, each time with another partner, as Streaming
DiLoCo synchronises fragments in turn (Douillard et al., arXiv 2501.18512): as many bytes, in smaller exchanges, and
what one replica has learned reaches the others sooner.

Synchronous and single-threaded, as the replica is, whose tensors these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch

from node.model.flat import Slice
from node.model.outer import OuterSettings, add_weighted, contribution, outer_step, outer_step_at_once
from node.model.resources import is_out_of_memory, retried
from protocol.codecs.kernels import BLOCK
from protocol.errors import Refused

EVERYTHING = slice(None)
PIECES_AT_ONCE = 16  # that are encoded and read in one go where steps are taken so: each launch has its price
PIECE_PARAMETERS = 2**18  # entries of a state or gossip piece: 1 MiB of float32, a second on a slow uplink

PieceOf: TypeAlias = Callable[["Stretch"], torch.Tensor]  # something [parameters], piece by piece


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


class PairPull(Protocol):
    """What a partner pulls a fragment by, ½(ẑ_j − ẑ_i); its user may write over what it is given."""

    def piece(self, piece: Stretch) -> torch.Tensor:
        """Return it over one piece, on the device of the weights."""

    def whole(self) -> torch.Tensor:
        """Return all of it, [parameters], for a device that has memory for it."""


@dataclass(frozen=True)
class Stretch:
    """A piece of a fragment, or several that follow one another: what is encoded, sent and read together.

    φ, Δ and z are computed at each access: θ changes until the round ends.
    """

    own: Fragment
    indices: range
    bounds: slice  # entries of the fragment

    def __len__(self) -> int:
        """Return the number of entries."""
        return int(self.bounds.stop - self.bounds.start)

    @property
    def blocks(self) -> slice:
        """The blocks of these entries, which begin with one."""
        return slice(self.bounds.start // BLOCK, -(-self.bounds.stop // BLOCK))

    @property
    def phi(self) -> torch.Tensor:
        return self.own.offered_phi(self.bounds)

    @property
    def progress(self) -> torch.Tensor:
        return self.own.offered_progress(self.bounds)

    @property
    def z(self) -> torch.Tensor:
        return self.own.contribution(self.bounds)

    @property
    def entries(self) -> int:
        """The number of entries of each piece but the last."""
        return PIECE_PARAMETERS

    def in_groups(self, size: int) -> Iterator[Stretch]:
        """Divide the pieces into groups of `size`, the last of the rest."""
        for first in range(0, len(self.indices), size):
            yield self.own.stretch(self.indices[first : first + size])

    def split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split a tensor of these entries into views of its pieces."""
        return torch.split(values, PIECE_PARAMETERS)


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
            self._step_in_pieces(lambda piece: mean_z[piece.bounds])

    def step_with(self, pull: PairPull) -> None:
        """Take the outer step of a pair: its own z and the pull make the mean; the pull is written over."""
        if self.steps_at_once:
            try:
                pull_of_all = retried(pull.whole)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                gain = self.settings.beta
                self._step_at_once(pull_of_all, gain, -gain)
                return
        self._step_in_pieces(lambda piece: self._add_contribution(pull.piece(piece), piece.bounds))

    def step_alone(self) -> None:
        """Take the outer step of a group of one, whose mean is as long as its own progress."""
        self.lengthen(1.0)
        if self.steps_at_once:
            self._step_at_once(None, self.settings.beta, -self.settings.beta)
        else:
            self._step_in_pieces(lambda piece: piece.z)

    def _step_at_once(self, added: torch.Tensor | None, by_theta: float, by_phi: float) -> None:
        weights = self.settings.alpha, by_theta, by_phi
        outer_step_at_once(self.phi, self.delta, self.theta, added, weights, self.compiles)

    @torch.no_grad()
    def _step_in_pieces(self, mean_z: PieceOf) -> None:
        for piece in self.all_pieces.in_groups(1):  # a piece at a time stays in the cache
            self._step_piece(partial(mean_z, piece), piece.bounds)
            self.theta[piece.bounds].copy_(self.phi[piece.bounds])

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
    def pieces_at_once(self) -> int:
        """The number of pieces that are encoded and read in one go: on a GPU, several."""
        return PIECES_AT_ONCE if self.steps_at_once else 1

    @property
    def all_pieces(self) -> Stretch:
        return self.stretch(range(self.pieces))

    def piece_bounds(self, index: int) -> slice:
        """The entries of a piece. Raises `Refused`."""
        start = index * PIECE_PARAMETERS
        if start >= self.parameters:
            raise Refused("no-such-piece", f"this stage has {self.pieces} pieces")
        return slice(start, min(start + PIECE_PARAMETERS, self.parameters))

    def piece(self, index: int) -> Stretch:
        """One piece. Raises `Refused`."""
        return self.stretch(range(index, index + 1))

    def stretch(self, indices: range) -> Stretch:
        """The pieces of these indices, which follow one another. Raises `Refused`."""
        first, last = self.piece_bounds(indices[0]), self.piece_bounds(indices[-1])
        return Stretch(self, indices, slice(first.start, last.stop))
