"""Half of a partner's contribution to a round, as it is put together from pieces.

What is averaged is z = γ·φ + β·Δ. It travels in one part, z itself, when the round has ended; or in two, φ during
the inner steps and Δ at the end, which are added up where they arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from node.model.outer import OuterSettings
from protocol.codec import Encoded, add_scaled, as_read
from protocol.messages import Part

COMPRESSED = "int8"  # kept as it came until the end: a quarter of the memory, and half of the passes over it


def weights_of(overlap: str, settings: OuterSettings) -> dict[Part, float]:
    """The parts that a contribution travels in, in this order, and the factor of each in z."""
    if overlap == "phi-early":
        return {"phi": settings.gamma, "progress": settings.beta}
    return {"z": 1.0}


class TensorPool:
    """Flat float32 tensors to be used again: taking fresh memory costs more than filling it.

    Mutable state: those not in use, never more than were in use at once.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A tensor [parameters] with anything in it."""
        if self._free:
            return self._free.pop()
        return torch.empty(self._parameters, dtype=torch.float32, device=self._device)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Only what nothing refers to any more, not even work that was cancelled."""
        self._free.append(tensor)


class IncomingUpdate:
    """Mutable state: ½z as far as it is known, what came compressed, and which pieces of which parts are there.

    Its memory is taken when the first piece comes; it is on the CPU.
    """

    def __init__(self, buffers: TensorPool, weights: Mapping[Part, float], pieces: int) -> None:
        self._buffers = buffers
        self._weights = {part: weight / 2 for part, weight in weights.items()}
        self._summed: dict[Part, set[int]] = {part: set() for part in weights}
        self._compressed: dict[Part, dict[int, Encoded]] = {part: {} for part in weights}
        self._missing = len(weights) * pieces
        self._sum: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def has(self, part: Part, index: int) -> bool:
        return index in self._summed[part] or index in self._compressed[part]

    def add(self, part: Part, index: int, bounds: slice, values: Encoded) -> None:
        """Take in piece `index` of a part, the entries of `bounds`. A piece that is there already changes nothing.

        Product and sum are rounded apart, so that the order in which parts come does not show in z.
        """
        if self.has(part, index):
            return
        self._missing -= 1
        if values.codec == COMPRESSED:
            self._compressed[part][index] = values
            return
        target, read, weight = self.total[bounds], as_read(values).to(torch.float32), self._weights[part]
        if any(index in known for known in self._summed.values()):
            target.add_(read * weight)
        else:
            torch.mul(read, weight, out=target)
        self._summed[part].add(index)

    def read(self, index: int, bounds: slice, target: torch.Tensor) -> None:
        """Piece `index` of ½z into `target`, once all of its parts are there; that may be the piece of `total`."""
        if not any(index in known for known in self._summed.values()):
            target.zero_()
        elif target.data_ptr() != self.total[bounds].data_ptr():
            target.copy_(self.total[bounds])
        for part, weight in self._weights.items():
            if index in self._compressed[part]:
                add_scaled(target, self._compressed[part][index], weight)

    @property
    def total(self) -> torch.Tensor:
        """½z [parameters], without what came compressed."""
        if self._sum is None:
            self._sum = self._buffers.take()
        return self._sum

    def give_back(self) -> None:
        """The round is over, and nobody refers to z."""
        if self._sum is not None:
            self._buffers.give_back(self._sum)
            self._sum = None
