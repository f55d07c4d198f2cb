"""Working weights: a stage's matrices in bf16, as they are multiplied, beside the float32 θ that is trained.

Autocast casts every matrix in every pass. These are cast once after each change of θ, with the same result, and the
head's has rows that tensor cores like. The gradients that a backward pass makes are added to the float32 ones of θ as
they come. Embedding, norms and biases stay float32, as under autocast. Only products see any of it: θ, φ and whatever
leaves the stage have the model's own shapes.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from node.model.head_loss import padded
from node.model.stage import Stage


@dataclass(frozen=True)
class _Master:
    """One matrix of θ and its gradient, float32 views."""

    values: torch.Tensor
    gradient: torch.Tensor


class WorkingWeights:
    """Keeps bf16 copies of a stage's matrices for multiplication, made anew when θ changes.

    The copies stand in the layers until `withdraw`. Called by the compute thread.
    """

    def __init__(self, stage: Stage, makes_logits: bool) -> None:
        """Take a stage whose parameters are views of θ, with gradients."""
        self.is_stale = True
        self.head = _head_like(stage.head) if makes_logits else None
        self._source = stage.head.data if makes_logits else None
        self._masters: dict[nn.Parameter, _Master] = {}
        self._hooks = []
        method = weakref.WeakMethod(
            self._hand_over
        )  # Python's collector does not see what autograd's hooks hold

        def hand_over(parameter: torch.Tensor) -> None:
            if (living := method()) is not None:
                living(parameter)

        for parameter in stage.layers.parameters():
            if parameter.dim() < 2:
                continue
            assert parameter.grad is not None
            self._masters[parameter] = _Master(parameter.data, parameter.grad)
            parameter.grad = None
            parameter.data = parameter.data.to(torch.bfloat16)
            hook = parameter.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast θ again if it has changed."""
        if not self.is_stale:
            return
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.values)
        if self.head is not None and self._source is not None:
            self.head[: len(self._source)].copy_(self._source)
        self.is_stale = False

    def withdraw(self) -> None:
        """Let the layers compute with θ itself again."""
        for hook in self._hooks:
            hook.remove()
        for parameter, master in self._masters.items():
            parameter.grad = None
            parameter.data = master.values
            parameter.grad = master.gradient

    def _hand_over(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._masters[parameter].gradient.add_(parameter.grad)
        parameter.grad = None


def _head_like(head: torch.Tensor) -> torch.Tensor:
    """A head of zeros for the copy, [rows, hidden]; the rows beyond the vocabulary stay zeros."""
    return torch.zeros(padded(len(head)), head.shape[1], dtype=torch.bfloat16, device=head.device)
