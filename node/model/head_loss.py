"""The model's head and its loss in one, over chunks of tokens, so that the logits never exist whole.

The gradients are made beside the loss: what the backward pass needs of a chunk's logits is there when its loss is,
and a vocabulary of 128,000 makes them the largest tensors of all by far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

LEAST_TOKENS = 512  # in a chunk: with fewer the gradient by the weights is gone over too often
LOGITS_ON_HOST, LOGITS_ON_DEVICE = 2**24, 2**28  # in a chunk, if that makes it larger
ALIGNED = (
    128  # rows of the head, for tensor cores: by a vocabulary that is odd to them it takes twice the time
)

# gives of logits [tokens, rows] and labels [tokens] the sum of the losses and the softmax; may write over the logits
Softmax: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class HeadLoss:
    """The mean loss in nats per token, and its gradients: [tokens, hidden] and, float32, [vocabulary, hidden]."""

    loss: torch.Tensor
    by_hidden: torch.Tensor
    by_weight: torch.Tensor | None  # None where it was not asked for


def padded(vocabulary: int) -> int:
    """Rows of a head that tensor cores are fast with."""
    return -(-vocabulary // ALIGNED) * ALIGNED


def plain_softmax(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Softmax` in float32, in place where the logits are that; the result has their type."""
    exact = logits.float()
    exact -= exact.amax(1, keepdim=True)
    of_label = exact.gather(1, labels[:, None])
    total = exact.exp_().sum(1, keepdim=True)
    exact /= total
    return (total.log_() - of_label).sum(), exact.to(logits.dtype)


@torch.no_grad()
def loss_with_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: int,
    learns: bool = True,
    softmax: Softmax = plain_softmax,
) -> HeadLoss:
    """Cross-entropy of `hidden` [tokens, hidden] times `weight` [rows, hidden] with `labels` [tokens].

    Products are in the weight's type, sums in float32. Rows of the weight beyond `vocabulary` are padding, which no
    loss and no gradient comes from. Without `learns` the weight gets no gradient.

    The gradient by logits is softmax − onehot(labels). In bf16 the ones would cost the small rest its precision, so
    that they are taken off the products instead: rows of the weight, and of the inputs.
    """
    tokens, rows = len(hidden), len(weight)
    total = torch.zeros((), device=hidden.device)
    by_hidden = torch.empty_like(hidden)
    by_weight = torch.zeros(rows, weight.shape[1], device=weight.device) if learns else None
    chunks = chunks_of(tokens, rows, hidden.device)
    buffer = weight.new_empty(chunks[0].stop, rows)  # one for all: the system gives memory slowly
    for chunk in chunks:
        part = hidden[chunk].to(weight.dtype)
        loss, likely = softmax(_logits(part, weight, vocabulary, buffer), labels[chunk])
        total += loss
        by_hidden[chunk] = likely @ weight
        by_hidden[chunk] -= weight[labels[chunk]]
        if by_weight is not None:
            _add_product(by_weight, likely.T, part)
            by_weight.index_add_(0, labels[chunk], part.float(), alpha=-1)
        del likely  # before the next chunk takes as much
    return HeadLoss(
        total.div_(tokens),
        by_hidden.div_(tokens),
        None if by_weight is None else by_weight[:vocabulary].div_(tokens),
    )


@torch.no_grad()
def summed_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over the tokens of their cross-entropy in nats; the rest as of `loss_with_gradients`."""
    total = torch.zeros((), device=hidden.device)
    chunks = chunks_of(len(hidden), len(weight), hidden.device)
    buffer = weight.new_empty(chunks[0].stop, len(weight))
    for chunk in chunks:
        logits = _logits(hidden[chunk].to(weight.dtype), weight, len(weight), buffer)
        total += F.cross_entropy(logits.float(), labels[chunk], reduction="sum")
    return total


def _logits(part: torch.Tensor, weight: torch.Tensor, vocabulary: int, into: torch.Tensor) -> torch.Tensor:
    """[tokens, rows] in the memory of `into`, which has at least as many; of padding minus infinity."""
    logits = torch.mm(part, weight.T, out=into[: len(part)])
    if len(weight) > vocabulary:
        logits[:, vocabulary:] = -torch.inf
    return logits


def logits_bytes(tokens: int, vocabulary: int, precision: str) -> int:
    """Bytes of the logits of a chunk of so many tokens; in bf16, which is for devices, beside their float32 and the
    softmax.
    """
    on_host = precision == "fp32"
    rows = vocabulary if on_host else padded(vocabulary)
    return min(tokens, _chunk_tokens(rows, on_host)) * rows * (4 if on_host else 2 + 4 + 2)


def _chunk_tokens(rows: int, on_host: bool) -> int:
    tokens = max(LEAST_TOKENS, (LOGITS_ON_HOST if on_host else LOGITS_ON_DEVICE) // rows)
    return (
        tokens if on_host else tokens // ALIGNED * ALIGNED
    )  # whole tiles of tensor cores, and one shape mostly


def chunks_of(tokens: int, rows: int, device: torch.device) -> list[slice]:
    """The chunks of so many tokens for a head of so many rows; the first is the largest."""
    size = _chunk_tokens(rows, device.type == "cpu")
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total ← total + left·right, added up in float32."""
    if left.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # elsewhere products of bf16 are rounded to it
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
