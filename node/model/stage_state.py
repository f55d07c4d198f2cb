"""A replica's whole state, to go on from elsewhere or later: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StageState:
    """Everything needed to go on elsewhere; all tensors flat float32 of the stage's parameter count.

    `step` counts the batches that were taken, `updates` those of them that AdamW learned from: its own step count.
    """

    step: int
    round: int
    steps_in_round: int
    updates: int
    phi: torch.Tensor
    theta: torch.Tensor
    delta: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor
    residual: torch.Tensor | None = None  # owed to partners by the codec's error feedback

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, those that there are."""
        tensors = {
            "phi": self.phi,
            "theta": self.theta,
            "delta": self.delta,
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
        }
        if self.residual is not None:
            tensors["residual"] = self.residual
        return tensors
