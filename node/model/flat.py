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


def layout(shapes: dict[str, tuple[int, ...]]) -> list[Slice]:
    """The places of named parameters in the flat tensor: matrices first, each kind in the given order."""
    slices: list[Slice] = []
    start = 0
    for name in sorted(shapes, key=lambda name: len(shapes[name]) < 2):  # stable
        slices.append(Slice(name, start, shapes[name]))
        start = slices[-1].stop
    return slices


class FlatParameters:
    """Re-homes a module's parameters and gradients in two flat tensors, `values` and `gradients`."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        parameters = dict(named)
        self.slices = layout({name: tuple(parameter.shape) for name, parameter in named})
        self.values = torch.empty(self.slices[-1].stop, dtype=torch.float32, device=named[0][1].device)
        self.gradients = torch.zeros_like(self.values)
        self.decayed = max((place.stop for place in self.slices if len(place.shape) >= 2), default=0)
        for place in self.slices:
            parameter = parameters[place.name]
            place.of(self.values).copy_(parameter.data)
            parameter.data = place.of(self.values)
            parameter.grad = place.of(self.gradients)

    def groups(self) -> list[tuple[nn.Parameter, slice]]:
        """Optimizer parameters over the flat tensors: the decayed part and, when there is one, the rest."""
        groups = []
        for start, stop in ((0, self.decayed), (self.decayed, self.values.numel())):
            if stop > start:
                parameter = nn.Parameter(self.values[start:stop])
                parameter.grad = self.gradients[start:stop]
                groups.append((parameter, slice(start, stop)))
        return groups
