"""A contribution to a round as it is put together from pieces: the own one when sent, the partner's when it comes.

What is averaged is z = γ·φ + β·Δ. It travels in one part, z itself, when the round has ended; or in two, φ during
the inner steps and Δ at the end, which are added up where they arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from node.outer import OuterSettings
from protocol.messages import Part


def weights_of(overlap: str, settings: OuterSettings) -> dict[Part, float]:
    """The parts that a contribution travels in, in this order, and the factor of each in z."""
    if overlap == "phi-early":
        return {"phi": settings.gamma, "progress": settings.beta}
    return {"z": 1.0}


class Buffers:
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


class Contribution:
    """Mutable state: z as far as it is known, and which pieces of which parts are in it.

    Its memory is taken when the first piece comes.
    """

    def __init__(self, buffers: Buffers, weights: Mapping[Part, float], pieces: int) -> None:
        self._buffers = buffers
        self._weights = weights
        self._known: dict[Part, set[int]] = {part: set() for part in weights}
        self._missing = len(weights) * pieces
        self._z: torch.Tensor | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._weights)

    @property
    def z(self) -> torch.Tensor:
        if self._z is None:
            self._z = self._buffers.take()
        return self._z

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def is_empty(self) -> bool:
        return not any(self._known.values())

    def has(self, part: Part, index: int) -> bool:
        return index in self._known[part]

    @torch.no_grad()
    def add(self, part: Part, index: int, bounds: slice, values: torch.Tensor) -> None:
        """Take in piece `index` of a part, the entries of `bounds`. A piece that is there already changes nothing.

        Product and sum are rounded apart, so that the order in which parts come does not show in z.
        """
        if self.has(part, index):
            return
        target, values, weight = self.z[bounds], values.to(torch.float32), self._weights[part]
        if any(index in known for known in self._known.values()):
            target.add_(values * weight)
        elif weight == 1.0:
            target.copy_(values)
        else:
            torch.mul(values, weight, out=target)
        self._known[part].add(index)
        self._missing -= 1

    def give_back(self) -> None:
        """The round is over, and nobody refers to z."""
        if self._z is not None:
            self._buffers.give_back(self._z)
            self._z = None
