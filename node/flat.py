"""All parameters of a stage as views into one flat float32 tensor.

Gossip, the outer step, state transfer and checkpoints then work on one contiguous buffer each, and AdamW on
two tensors: the matrices, which decay, and after them the vectors, which do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Slice:
    """Where one named parameter lives in the flat tensor."""

    name: str  # as in LlamaForCausalLM's state dict
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.shape)


class FlatParameters:
    """Re-homes a module's parameters and gradients in two flat tensors, `values` and `gradients`."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        ordered = sorted(named, key=lambda item: item[1].dim() < 2)  # stable: matrices first
        total = sum(parameter.numel() for _, parameter in ordered)
        self.values = torch.empty(total, dtype=torch.float32, device=ordered[0][1].device)
        self.gradients = torch.zeros_like(self.values)
        self.decayed = sum(parameter.numel() for _, parameter in ordered if parameter.dim() >= 2)
        self.slices: list[Slice] = []
        start = 0
        for name, parameter in ordered:
            place = Slice(name, start, tuple(parameter.shape))
            self.slices.append(place)
            place.of(self.values).copy_(parameter.data)
            parameter.data = place.of(self.values)
            parameter.grad = place.of(self.gradients)
            start = place.stop

    def groups(self) -> list[tuple[nn.Parameter, slice]]:
        """Optimizer parameters over the flat tensors: the decayed part and, when there is one, the rest."""
        groups = []
        for start, stop in ((0, self.decayed), (self.decayed, self.values.numel())):
            if stop > start:
                parameter = nn.Parameter(self.values[start:stop])
                parameter.grad = self.gradients[start:stop]
                groups.append((parameter, slice(start, stop)))
        return groups
