"""The inner step: its learning rate, the norm of a batch's gradient, and the optimizer on a stage's flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim.adamw import adamw

from node.model.flat import FlatParameters
from node.model.muon import Muon, muon_range, muons_of
from node.model.resources import is_out_of_memory, retried
from protocol.codecs.codec import require_finite
from protocol.errors import CodecError
from protocol.run.manifest import Inner

AT_ONCE = 2**18  # entries added up in float64 at a time: 2 MiB

LeftOut = Literal["", "non-finite", "absurd", "replaced", "memory"]
LARGEST_NORM = 1e9  # of a gradient: clipped to 1, what is beyond that is no direction to go in


@dataclass(frozen=True)
class StepReport:
    """One inner step: the global gradient norm before clipping, NaN when it was not whole, and the learning rate.

    `left_out` tells why the batch was not learned from; empty when it was.
    """

    step: int
    gradient_norm: float
    learning_rate: float
    left_out: LeftOut = ""


def learning_rate(inner: Inner, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to the minimum, which holds beyond the last step.

    `step` counts the inner steps done before this one.
    """
    if step < inner.warmup_steps:
        return inner.learning_rate * (step + 1) / inner.warmup_steps
    progress = min(1.0, (step - inner.warmup_steps) / (inner.total_steps - inner.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return inner.min_learning_rate + (inner.learning_rate - inner.min_learning_rate) * cosine


class AdamW:
    """Fused AdamW on a part of the flat tensors.

    By torch's function: the class `torch.optim.AdamW` loads torch's compiler, 70 MB and seconds that no step needs.
    """

    def __init__(
        self, inner: Inner, flat: FlatParameters, moments: Sequence[torch.Tensor], place: slice
    ) -> None:
        first, second = moments
        self._tensors = ([flat.values[place]], [flat.gradients[place]], [first[place]], [second[place]])
        self._inner = inner
        self._decay = inner.weight_decay if place.stop <= flat.decayed else 0.0
        self._updates = torch.zeros((), device=flat.values.device)

    @torch.no_grad()
    def step(self, rate: float, updates: int) -> None:
        """Take one step after so many `updates`. When memory runs out nothing has changed: it may be repeated."""
        self._updates.fill_(float(updates))  # torch adds one
        inner, (values, gradients, first, second) = self._inner, self._tensors
        adamw(
            values, gradients, first, second, [], [self._updates], fused=True, amsgrad=False, maximize=False,
            beta1=inner.beta1, beta2=inner.beta2, eps=inner.eps, lr=rate, weight_decay=self._decay,
        )  # fmt: skip


class InnerOptimizer:
    """AdamW in parts: the matrices, which decay, and the vectors, which do not; with Muon for the layers' matrices.

    `moments` are both moments, flat float32, made of so many `updates`.
    """

    def __init__(self, inner: Inner, flat: FlatParameters) -> None:
        first, second = torch.zeros_like(flat.values), torch.zeros_like(flat.values)
        self.moments = (first, second)
        self.updates = 0
        self._parts: list[AdamW | Muon] = [*muons_of(inner, flat, first)]
        places = flat.groups(left_out=muon_range(inner, flat.slices))
        self._parts += [AdamW(inner, flat, self.moments, place) for place in places]

    def update(self, rate: float) -> bool:
        """Take one step by the gradients as they are, with this learning rate.

        False when memory ran out, for a part also once caches were emptied: that part and those after it stay.
        """
        try:
            for part in self._parts:
                retried(self._step, part, rate)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        self.updates += 1
        return True

    def dry_run(self) -> None:
        """Take all the memory that updates will; with gradients of zero it changes nothing."""
        for part in self._parts:
            self._step(part, 0.0)

    def _step(self, part: AdamW | Muon, rate: float) -> None:
        if isinstance(part, Muon):
            part.step(rate)
        else:
            part.step(rate, self.updates)


def norm_of(gradients: torch.Tensor) -> float:
    """‖gradients‖; finite if all of them are: squares beyond float32 are added up in float64, piece by piece."""
    norm = float(torch.linalg.vector_norm(gradients))
    if math.isfinite(norm):
        return norm
    squares = (float(_exact(part).square().sum()) for part in torch.split(gradients, AT_ONCE))
    return math.sqrt(sum(squares))


def _exact(values: torch.Tensor) -> torch.Tensor:
    """The values in float64, on the host where their device has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether none of the tensors holds NaN or infinity."""
    try:
        for tensor in tensors:
            require_finite(tensor)
    except CodecError:
        return False
    return True
