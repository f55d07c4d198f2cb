"""Error feedback, where `wire.error_feedback` asks for it: what a lossy codec left out goes with the next round's Δ.

    sent = Q(Δ + e),   e ← Δ + e − sent

so that the sum of what was sent is the sum of all Δ up to the last e, which is no larger than one rounding.
"""

from __future__ import annotations

import torch


class Residual:
    """Mutable state: e [parameters], float32, from the first lossy contribution on. Used by the compute thread."""

    def __init__(self, phi: torch.Tensor) -> None:
        self._phi = phi  # its shape and device
        self._owed: torch.Tensor | None = None

    def add_to(self, progress: torch.Tensor, bounds: slice) -> None:
        """Δ ← Δ + e over `bounds`."""
        if self._owed is not None:
            progress.add_(self._owed[bounds])

    def keep(self, meant: torch.Tensor, sent: torch.Tensor, bounds: slice) -> None:
        """e over `bounds`: what was to be sent less what the receiver reads."""
        if self._owed is None:
            self._owed = torch.zeros_like(self._phi)
        torch.sub(meant, sent, out=self._owed[bounds])

    @property
    def owed(self) -> torch.Tensor | None:
        """e [parameters] itself, no copy; None before the first lossy contribution."""
        return self._owed

    def restore(self, owed: torch.Tensor | None) -> None:
        """Owe what a snapshot of the same weights owed."""
        self._owed = None if owed is None else owed.to(self._phi.device, copy=True)

    def norm(self) -> float:
        return 0.0 if self._owed is None else float(torch.linalg.vector_norm(self._owed))

    def clear(self) -> None:
        """Nothing is owed: the weights are not those that the rest belonged to."""
        self._owed = None
