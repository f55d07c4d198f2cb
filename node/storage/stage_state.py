"""The state of a replica as flat float32 tensors and counts: what a checkpoint holds, and what newcomers are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from protocol.records.lineage import UNDATED, Lineage

# Of weights, momentum and moments that are read from a disk: no model comes near, and the square of the norm of 2^33
# such numbers is still a float32.
LARGEST = 1e9


@dataclass(frozen=True)
class StageState:
    """Everything needed to go on elsewhere or later, what a checkpoint holds; tensors are [parameters].

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
    lineage: Lineage = field(default=UNDATED, kw_only=True)  # which beginning all of it comes from

    def holding(self, tensors: Mapping[str, torch.Tensor]) -> StageState:
        """A flat layout of the same counts that holds these tensors, by name."""
        return StageState(
            self.step, self.round, self.steps_in_round, self.updates, tensors["phi"], tensors["theta"],
            tensors["delta"], tensors["first_moment"], tensors["second_moment"],
            lineage=self.lineage,
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, those that there are."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
