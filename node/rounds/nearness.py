"""Estimates how near the replicas of a stage are, block by block, for contributions sent modulo a few bits.

Such a contribution (`codecs.lattice`) can be read by a partner that is nearer than the sender supposed, and is the
coarser the further off the sender supposed it to be. What there is to go by is how far off the last partners were
found to be in each block, how far off this one is in a sample of φ, and how far the own weights have moved since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import cell_for
from protocol.codecs.near_codecs import BITS, SPARE

# Of what was expected before that is still expected after a partner was nearer: rare words are moved by one replica
# in a while, and the others hear of it one after another.
KEPT = 0.5
WIDENED = 2.0  # after a block that neither could read
LOST = 0.5  # of the blocks unread: the stage is somewhere else than it was thought to be


@dataclass(frozen=True)
class Reading:
    """The outcome of reading a partner's contribution beside this replica's, [blocks]."""

    found: torch.Tensor  # root mean square of a value's difference, the codec's rounding not counted
    unread: torch.Tensor  # bool


class Nearness:
    """Estimates the distance between replicas block by block, from which codecs for near weights take their cells."""

    def __init__(self, parameters: int) -> None:
        self._blocks = -(-parameters // BLOCK)
        self._expected: torch.Tensor | None = None

    def __repr__(self) -> str:
        expected = self._expected
        known = "unknown" if expected is None else f"{float(expected.square().mean().sqrt()):.2e} a value"
        return f"<Nearness of {self._blocks} blocks, {known}>"

    @property
    def is_known(self) -> bool:
        return self._expected is not None

    def forget(self) -> None:
        """Forget the distances, as weights are others or a partner was far: the next contribution goes in int8."""
        self._expected = None

    def look(self, whole: float) -> None:
        """Take in that the partner is `whole` away (root mean square of a value): all expected blocks follow it."""
        if self._expected is not None and (known := float(self._expected.square().mean().sqrt())) > 0:
            self._expected = self._expected * (SPARE * whole / known)

    def distances(self, blocks: slice, progress: torch.Tensor) -> torch.Tensor:
        """The distances to allow for, of these blocks, after so much progress of each (root mean squares)."""
        assert self._expected is not None
        return torch.maximum(self._expected[blocks], progress.cpu())

    def cells(self, blocks: slice, progress: torch.Tensor, codec: str) -> torch.Tensor:
        """The cells for a codec, of these blocks."""
        return cell_for(self.distances(blocks, progress), BITS[codec])

    def met(
        self, found: torch.Tensor, allowed: torch.Tensor, unread: torch.Tensor, unread_there: torch.Tensor
    ) -> None:
        """Take in an exchange: distances `found` of the blocks that were read here, and what had been `allowed` for.

        All are [blocks]; `unread` are those of the partner's contribution, `unread_there` those of the own.
        """
        before = torch.zeros_like(found) if self._expected is None else self._expected
        guessed = torch.where(unread_there, allowed * WIDENED, allowed)
        self._expected = torch.where(unread, guessed, torch.maximum(found, KEPT * before))
        if float((unread | unread_there).float().mean()) > LOST:
            self.forget()
