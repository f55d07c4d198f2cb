"""Computes a microbatch again now and then, and compares: a device or memory that is damaged gives other numbers.

The same passes with the same weights on the same device differ by rounding at most, and by nothing on most. A flipped
bit, or memory that holds what was computed before, differs by more. So a machine finds out about itself, before
anybody else has to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from protocol.errors import Unrepeatable
from protocol.windows import window

EVERY = 100  # microbatches, of which one is computed again: a third of a percent of the work
EAGER = 4  # while something has been odd lately
DOUBTFUL = 32  # comparisons after one that failed
# of the value and of the root mean square, what rounding may change a value by; where sums are not always in the same
# order bf16 rounds to one neighbour or the other, which are 0.008 of a value apart
TOLERANCE = 2.0**-6


class SelfCheck:
    """Decides when to compute again, and compares. Mutable state: microbatches so far, and comparisons in doubt.

    One thread uses it.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._since = 0
        self._doubtful = 0
        self.compared = 0
        self.failed = 0
        self.skipped = 0  # for want of memory

    @window
    def __repr__(self) -> str:
        return f"Compared: {self.compared:,} | Differed: {self.failed:,} | In doubt for: {self._doubtful}"

    def doubt(self) -> None:
        """Compare more often for a while: others found something odd."""
        self._doubtful = DOUBTFUL

    @torch.no_grad()
    def compare(self, found: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """Compare with what is computed `again`, if it is time. Raises `Unrepeatable` when they differ.

        `found` must be finite, and `again` gives the same shape on the same device.
        """
        self._since += 1
        if self._since < (EAGER if self._doubtful else self._every):
            return
        self._since = 0
        self._doubtful = max(0, self._doubtful - 1)
        one, other = found.detach().float(), again().float()
        self.compared += 1
        usual = torch.linalg.vector_norm(other) / other.numel() ** 0.5
        apart = (one - other).abs()
        if bool((apart <= TOLERANCE * (usual + other.abs())).all()):  # also false for NaN
            return
        self.failed += 1
        self._doubtful = DOUBTFUL
        raise Unrepeatable(float(apart.max()), float(usual))
