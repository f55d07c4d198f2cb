"""Muon on the matrices of a stage's layers: momentum, orthogonalised by Newton's and Schulz's iteration.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the factor of Liu et al., "Muon
is scalable for LLM training" (arXiv 2502.16982), eq. (4), which makes its steps as long as AdamW's. Of a gradient
G, [rows, columns], at the learning rate η and the decay λ:

    M ← μ·M + (1 − μ)·G
    O = NewtonSchulz((1 − μ)·G + μ·M)
    θ ← (1 − η·λ)·θ − 0.2·√max(rows, columns)·η·O

as `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. M is where AdamW has its first moment; the second one's
place stays zero. Embeddings, head, norms and biases are AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from node.machine.accelerator import has_bf16
from node.model.flat import FlatParameters, Slice
from protocol.run.manifest import Inner

MOMENTUM = 0.95  # μ
ITERATIONS = 5
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315  # of Jordan's polynomial: steepest at zero
SMALLEST_NORM = 1e-7
LIKE_ADAMW = 0.2  # root mean square of AdamW's steps, in learning rates
AT_ONCE = 2**23  # entries of equal shapes that are iterated together: 32 MiB of float32
WORKING_COPIES = 6  # of those: G, M, their mean, two iterates, products of rows


@torch.no_grad()
def orthogonalised(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """About UVᵀ of each USVᵀ of [matrices, rows, columns]: singular values of 0.7 to 1.2. Computed in `dtype`."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.to(dtype).mT if is_tall else matrices.to(dtype)
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(
            wide, torch.baddbmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC), wide, beta=LINEAR
        )
    return wide.mT if is_tall else wide


class Muon:
    """The optimizer of some matrices of one shape; their momentum is a part of AdamW's flat first moment."""

    def __init__(
        self, inner: Inner, places: Sequence[Slice], flat: FlatParameters, momentum: torch.Tensor
    ) -> None:
        self._gradients = [place.of(flat.gradients) for place in places]
        self._momenta = [place.of(momentum) for place in places]
        self._weights = [place.of(flat.values) for place in places]
        self._decay = inner.weight_decay
        self._faster = (inner.muon_learning_rate or inner.learning_rate) / inner.learning_rate
        self._scale = LIKE_ADAMW * math.sqrt(max(places[0].shape))
        self._dtype = torch.bfloat16 if has_bf16(flat.values.device) else torch.float32

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step at AdamW's learning rate. When memory runs out nothing has changed: it may be repeated."""
        rate *= self._faster
        gradients = torch.stack(self._gradients)
        momenta = torch.stack(self._momenta).lerp_(gradients, 1 - MOMENTUM)
        directions = orthogonalised(gradients.lerp_(momenta, MOMENTUM), self._dtype)
        for weight, kept, momentum, direction in zip(
            self._weights, self._momenta, momenta, directions, strict=True
        ):
            kept.copy_(momentum)
            weight.mul_(1 - rate * self._decay).add_(direction, alpha=-rate * self._scale)


def muons_of(inner: Inner, flat: FlatParameters, momentum: torch.Tensor) -> list[Muon]:
    """Make optimizers for a stage's matrices that are not AdamW's, by shape, `AT_ONCE` entries or one matrix each."""
    batches = [
        matrices[start : start + count]
        for shape, matrices in _by_shape(inner, flat.slices).items()
        for count in [max(1, AT_ONCE // math.prod(shape))]
        for start in range(0, len(matrices), count)
    ]
    return [Muon(inner, places, flat, momentum) for places in batches]


def muon_range(inner: Inner, slices: Sequence[Slice]) -> slice:
    """The entries that Muon trains: `layout` has the layers' matrices side by side."""
    places = _trained(inner, slices)
    return slice(places[0].start, places[-1].stop) if places else slice(0, 0)


def muon_workspace(inner: Inner, slices: Sequence[Slice]) -> int:
    """Bytes of the device that a step takes beside the state."""
    largest = [
        max(math.prod(shape), min(AT_ONCE, len(places) * math.prod(shape)))
        for shape, places in _by_shape(inner, slices).items()
    ]
    return 4 * WORKING_COPIES * max(largest, default=0)


def _by_shape(inner: Inner, slices: Sequence[Slice]) -> Mapping[tuple[int, ...], list[Slice]]:
    shapes: dict[tuple[int, ...], list[Slice]] = {}
    for place in _trained(inner, slices):
        shapes.setdefault(place.shape, []).append(place)
    return shapes


def _trained(inner: Inner, slices: Sequence[Slice]) -> list[Slice]:
    if inner.optimizer != "muon":
        return []
    return [place for place in slices if len(place.shape) == 2 and ".layers." in place.name]
