"""The flat float32 tensors of a replica: parameters and gradients as views into one each.

Gossip, the outer step, state transfer and checkpoints work on one contiguous buffer each, and AdamW on two tensors:
the matrices, which decay, and after them the vectors, which do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn


@dataclass(frozen=True)
class Slice:
    """The place of one named parameter in the flat tensor."""

    name: str  # as in LlamaForCausalLM's state dict
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.shape)


def layout(shapes: Mapping[str, tuple[int, ...]]) -> list[Slice]:
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

    @torch.no_grad()
    def make_blank(self) -> None:
        """Set weights that are no model and give finite values: zeros, with gains of one."""
        self.values.zero_()
        for place in self.slices:
            if len(place.shape) < 2 and not place.name.endswith(".bias"):
                place.of(self.values).fill_(1.0)

    def groups(self, left_out: slice) -> list[slice]:
        """The entries of the flat tensors but for `left_out`, in groups: what decays, and what does not."""
        ends = (0, left_out.start, left_out.stop, self.decayed, self.values.numel())
        places = [slice(start, stop) for start, stop in pairwise(ends) if stop > start]
        return [place for place in places if place != left_out]
