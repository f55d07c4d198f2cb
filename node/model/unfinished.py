"""A microbatch whose backward pass ended halfway, as when memory runs out: what of it is in the gradients already.

Autograd adds to one parameter's gradient after another. Which of them it has come to is noted as it goes, so that the
rest can be added later, in smaller parts, and each parameter gets each sequence's gradient once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from protocol.errors import OddLoss

HEAD = -1  # its gradient by the loss is added by hand; through the layers the same matrix may get another one


@dataclass(frozen=True)
class Rows:
    """Sequences [start, stop) of a microbatch, and what has their gradient: parameters by number, and `HEAD`."""

    start: int
    stop: int
    added: frozenset[int] = frozenset()

    @property
    def bounds(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, size: int) -> tuple[Rows, ...]:
        """Split the work into parts of at most `size` sequences; 0 is all at once."""
        step = size or len(self)
        starts = range(self.start, self.stop, step)
        return tuple(Rows(start, min(start + step, self.stop), self.added) for start in starts)


@dataclass
class Unfinished:
    """The parts of a microbatch whose backward pass was interrupted, so that it can be resumed.

    `to_do` is what is left of it; the other lists hold what the parts that are over gave, in order.
    """

    inputs: torch.Tensor  # as the caller gave them; compared by identity
    to_do: deque[Rows]
    over: list[Rows] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    by_inputs: list[torch.Tensor | None] = field(default_factory=list)

    def parts(self, at_once: int) -> Iterator[Rows]:
        """Yield part after part, each out of `to_do` once the next is asked for; `at_once` sequences at most."""
        while self.to_do:
            first, *others = self.to_do.popleft().split(at_once)
            self.to_do.extendleft(reversed([first, *others]))
            yield first
            self.over.append(self.to_do.popleft())

    def require_at_most(self, most: float, loss: float, share: float) -> None:
        """Raise `OddLoss` if the parts that are over and the next one lose more than all of it may, `most`.

        `loss` is the next one's part of the mean, `share` its part of the sequences. The error has the mean of these
        parts: no loss is below 0, so that the others cannot bring that of all below `most`.
        """
        spent = loss + sum(part.item() for part in self.losses)
        if spent > most:
            raise OddLoss(spent / (share + sum(map(len, self.over)) / len(self.inputs)), most)

    @property
    def has_begun(self) -> bool:
        """True if some gradient holds some of it."""
        return bool(self.over or any(part.added for part in self.to_do))


class Accumulation:
    """Notes which gradients a part of a backward pass has already added to, by hooks on the parameters.

    Watches the parameters of one stage for as long as that lives, and does not make it live longer: autograd's hooks
    hold numbers alone, since Python's collector does not see a parameter that a hook of its own refers to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._all = tuple(parameters)
        self._added: set[int] = set()
        for number, parameter in enumerate(self._all):
            hook = _noting(self._added, number)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def add_to_head(self, head: torch.Tensor, by_weight: torch.Tensor, share: float) -> None:
        """Add the head's gradient by the loss, times `share`, unless it is in."""
        assert head.grad is not None
        if HEAD not in self._added:
            head.grad.add_(by_weight, alpha=share)
            self._added.add(HEAD)

    @contextmanager
    def of(self, unfinished: Unfinished) -> Iterator[None]:
        """Wrap the passes of the part that comes first in `to_do`: when they fail it stays, with what is in."""
        part = unfinished.to_do[0]
        self._added.clear()
        self._added.update(part.added)
        try:
            yield
        except BaseException:
            unfinished.to_do[0] = Rows(part.start, part.stop, frozenset(self._added))
            raise

    def backward(self, leaf: torch.Tensor, outputs: torch.Tensor, by_outputs: torch.Tensor) -> None:
        """Add the gradients that are not in yet, and that by the `leaf`, if it takes one."""
        wanted: list[torch.Tensor] = [p for number, p in enumerate(self._all) if number not in self._added]
        if len(wanted) == len(self._all):
            backward(outputs, by_outputs)
            return
        if leaf.requires_grad:
            wanted.append(leaf)
        if wanted:
            backward(outputs, by_outputs, wanted)


def backward(
    outputs: torch.Tensor, by_outputs: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None
) -> None:
    """Do as `torch.autograd.backward` with gradients by `outputs`, which imports sympy to compare two shapes:
    37 MB of every node and a second of its start. Raises `ValueError` for another shape than the outputs'.
    """
    if by_outputs.shape != outputs.shape:
        raise ValueError(f"gradients {tuple(by_outputs.shape)} by outputs {tuple(outputs.shape)}")
    number: torch.Tensor = _Given.apply(outputs, by_outputs)  # type: ignore[no-untyped-call]
    torch.autograd.backward(number, inputs=inputs)


class _Given(torch.autograd.Function):
    """A number whose gradients by the first argument are the second."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, by_outputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(by_outputs)
        return outputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        (by_outputs,) = ctx.saved_tensors
        return by_outputs, None


def _noting(added: set[int], number: int) -> Callable[[torch.Tensor], None]:
    return lambda _: added.add(number)
