"""Forward and backward passes of microbatches through one stage, with the fast weights θ and with the slow ones φ.

Synchronous and single-threaded: the compute thread calls it. Nothing here changes weights; backward passes add to the
gradients of the stage's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from node.model.execution import Execution
from node.model.stage import Stage
from protocol.errors import NonFinite

if TYPE_CHECKING:
    from transformers import Cache

Run: TypeAlias = Callable[
    [torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]  # gives (inputs as a leaf, outputs)
Learned: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # the loss, and its gradient by the inputs


class Passes:
    """Mutable state: how passes are computed from now on; float32 with nothing recomputed until that is told."""

    def __init__(self, stage: Stage, device: torch.device, slow_weights: Mapping[str, torch.Tensor]) -> None:
        """`slow_weights` are φ by the names of the stage's parameters: views, which follow it as it changes."""
        self.stage = stage
        self.execution = Execution()
        # until whoever applies the gradients says otherwise:
        self.has_run = False
        self.is_spoiled = False  # a backward pass ended halfway: part of a microbatch is in the gradients
        self._device = device
        self._slow_weights = dict(slow_weights)
        self._compute: Callable[[torch.Tensor], torch.Tensor] = stage

    def execute(self, execution: Execution) -> None:
        """Compute so from now on."""
        self.execution = execution
        self.stage.recomputes = execution.recomputes
        self._compute = torch.compile(self.stage) if execution.compiles else self.stage

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the stage and keep its graph. Returns (inputs as a leaf, outputs) for `backward`.

        In slices no graph is kept: `backward` runs them again.
        """
        self.has_run = True
        slices = self._slices(inputs.to(self._device))
        if len(slices) > 1:
            with torch.no_grad():
                return inputs.to(self._device), torch.cat([self._run(part)[1] for part in slices])
        return self._run(slices[0])

    def backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Accumulate parameter gradients; returns the gradient by the inputs, None on the first stage."""
        if outputs.requires_grad:
            self._add_gradients(outputs, gradient.to(self._device, outputs.dtype))
            return leaf.grad
        return self.backward_again(leaf, gradient)

    def backward_again(self, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """The same with the forward pass repeated, slice by slice: where its graph was not kept, or is spent."""
        leaf, gradient, by_inputs = leaf.detach(), gradient.to(self._device), []
        for part, by_outputs in zip(self._slices(leaf), self._slices(gradient), strict=True):
            part, outputs = self._run(part)
            self._add_gradients(outputs, by_outputs.to(outputs.dtype))
            by_inputs.append(part.grad)
        return _joined(by_inputs)

    def last_stage(self, inputs: torch.Tensor, labels: torch.Tensor) -> Learned:
        """Mean cross-entropy in nats per token, and the gradient by the inputs; accumulates those of parameters.

        The loss is on the device, which may not have computed it yet.
        """
        return self._learn(self._run, inputs, labels)

    def head(
        self, inputs: torch.Tensor, labels: torch.Tensor, learns: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """First stage of a ring, with what comes back from the last one: as `last_stage`.

        Without `learns` the parameters get no gradient of it.
        """
        loss, by_inputs = self._learn(self._run_head, inputs, labels, learns)
        assert by_inputs is not None
        return loss, by_inputs

    @torch.no_grad()
    def evaluate(
        self, inputs: torch.Tensor, is_back: bool = False, cache: Cache | None = None
    ) -> torch.Tensor:
        """The stage's outputs under the slow weights φ, whatever θ is at; the rest as of `Stage.forward`."""
        return torch.cat(list(self.evaluate_slices(inputs, is_back, cache)))

    @torch.no_grad()
    def evaluate_slices(
        self, inputs: torch.Tensor, is_back: bool = False, cache: Cache | None = None
    ) -> Iterator[torch.Tensor]:
        """The same, as many sequences at a time as training computes at once; a cache is of one sequence."""
        for part in self._slices(inputs.to(self._device)):
            outputs = torch.func.functional_call(self.stage, self._slow_weights, (part, is_back, cache))
            yield torch.as_tensor(outputs)

    def _run(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = inputs if self.stage.is_first else inputs.detach().requires_grad_()
        with self.execution.autocast(self._device):
            return leaf, self._compute(leaf)

    def _run_head(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = inputs.detach().requires_grad_()
        with self.execution.autocast(self._device):
            return leaf, self.stage(leaf, is_back=True)

    def _learn(self, run: Run, inputs: torch.Tensor, labels: torch.Tensor, learns: bool = True) -> Learned:
        """Slice by slice forward and backward, with the mean loss of all.

        Raises `NonFinite` for a loss that is NaN or infinite; the parameters' gradients are then as before.
        """
        self.has_run = True
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        losses: list[torch.Tensor] = []
        by_inputs = []
        for part, targets in zip(self._slices(inputs), self._slices(labels), strict=True):
            leaf, logits = run(part)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss = loss * (len(part) / len(inputs))
            if not bool(loss.isfinite()):
                self._take_back(run, inputs, labels, len(losses) if learns else 0)
                raise NonFinite("the loss")
            if learns:
                self._add_gradients(loss)
            else:
                torch.autograd.backward(loss, inputs=[leaf])
            losses.append(loss.detach())
            by_inputs.append(leaf.grad)
            del logits, loss  # before the next slice takes as much
        return torch.stack(losses).sum(), _joined(by_inputs)

    def _take_back(self, run: Run, inputs: torch.Tensor, labels: torch.Tensor, slices: int) -> None:
        """Subtract the gradients of the first slices of a microbatch that turned out to be worthless."""
        pairs = list(zip(self._slices(inputs), self._slices(labels), strict=True))
        for part, targets in pairs[:slices]:
            loss = F.cross_entropy(run(part)[1].flatten(0, 1).float(), targets.flatten())
            self._add_gradients(-loss * (len(part) / len(inputs)))

    def _add_gradients(self, outputs: torch.Tensor, by_outputs: torch.Tensor | None = None) -> None:
        before, self.is_spoiled = self.is_spoiled, True  # unless it comes to its end
        torch.autograd.backward(outputs, by_outputs)
        self.is_spoiled = before

    def _slices(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of a microbatch's first dimension, as many sequences each as are computed at once."""
        return torch.split(tensor, self.execution.at_once or max(1, len(tensor)))


def _joined(by_inputs: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The gradients of slices as that of the microbatch; None at the first stage."""
    known = [gradient for gradient in by_inputs if gradient is not None]
    if len(known) > 1:
        return torch.cat(known)
    return known[0] if known else None


@torch.no_grad()
def evaluate_through(route: Sequence[Passes], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [sequences, tokens, vocabulary] under the slow weights of one replica of each stage."""
    hidden = tokens
    for passes in route:
        hidden = passes.evaluate(hidden)
    return route[0].evaluate(hidden, is_back=True) if route[0].stage.is_ring else hidden
