"""Forward and backward passes of microbatches through one stage, with the fast weights θ and with the slow ones φ.

Synchronous and single-threaded: the compute thread calls it. Nothing here changes weights; backward passes add to the
gradients of the stage's parameters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from node.model.compiling import CompiledBody, Compiling
from node.model.decoder import KeyValues
from node.model.execution import Execution
from node.model.head_loss import HeadLoss, loss_with_gradients, plain_softmax, summed_loss
from node.model.probes import Probes
from node.model.stage import Stage
from node.model.unfinished import Accumulation, Rows, Unfinished, backward
from node.model.working import WorkingWeights
from protocol.errors import NonFinite, OddLoss

# gives (inputs as a leaf, what the head takes)
Run: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Learned: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # the loss, and its gradient by the inputs


class Passes:
    """Runs forward and backward passes of microbatches through one stage.

    Passes are computed as `execution` says: float32 with nothing recomputed until that is told.
    """

    def __init__(self, stage: Stage, device: torch.device, slow_weights: Mapping[str, torch.Tensor]) -> None:
        """`slow_weights` are φ by the names of the stage's parameters: views, which follow it as it changes."""
        self.stage = stage
        self.execution = Execution()
        # until whoever applies the gradients says otherwise:
        self.has_run = False
        self._is_spoiled = False
        self._unfinished: Unfinished | None = None  # of a pass that failed, for when it is tried again
        self._accumulation = Accumulation(list(stage.parameters()))
        self._device = device
        self._slow_weights = dict(slow_weights)
        self._compute: Callable[[torch.Tensor], torch.Tensor] = stage.body
        self.compiling = Compiling()
        self.compiled: CompiledBody | None = None
        self._working: WorkingWeights | None = None
        self.probes = Probes()

    def execute(self, execution: Execution) -> None:
        """Compute so from now on. No graph may be kept when the precision changes."""
        self.execution = execution
        self.stage.recomputes = execution.recomputes
        if execution.compiles and (self.compiled is None or self.compiled.compiling != self.compiling):
            self.compiled = CompiledBody(self.stage, self.compiling)
        self._compute = self.compiled if execution.compiles and self.compiled else self.stage.body
        if execution.precision == "bf16" and self._working is None:
            self._working = WorkingWeights(self.stage, self._makes_logits)
        elif execution.precision == "fp32" and self._working is not None:
            self._working.withdraw()
            self._working = None

    def making_code(self) -> AbstractContextManager[None]:
        """Compile, where the execution compiles, for the kinds of inputs that come meanwhile; no others ever."""
        return self.compiled.making_code() if self.execution.compiles and self.compiled else nullcontext()

    def weights_changed(self) -> None:
        """Note that θ is another than when the last pass began."""
        if self._working is not None:
            self._working.is_stale = True

    @property
    def is_spoiled(self) -> bool:
        """True if part of a microbatch is in the gradients and nobody has come to add the rest."""
        return self._is_spoiled or (self._unfinished is not None and self._unfinished.has_begun)

    def gradients_forgotten(self) -> None:
        """Note that the gradients are zeros: a batch begins, as if no pass had run."""
        self.has_run = self._is_spoiled = False
        self._unfinished = None

    @property
    def _makes_logits(self) -> bool:
        return self.stage.is_first if self.stage.is_ring else self.stage.is_last

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
        """Accumulate parameter gradients; returns the gradient by the inputs, None on the first stage.

        When it fails halfway, `backward_again` with the same `leaf` adds what is not in yet.
        """
        if not outputs.requires_grad:
            return self.backward_again(leaf, gradient)
        unfinished = self._begun(leaf)
        for _ in unfinished.parts(at_once=0):
            with self._accumulation.of(unfinished):
                self._accumulation.backward(leaf, outputs, gradient.to(self._device, outputs.dtype))
        self._unfinished = None
        return leaf.grad

    def backward_again(self, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Repeat the forward pass, slice by slice, then do `backward`: where the graph was not kept, or is spent."""
        unfinished = self._begun(leaf)
        leaf, gradient = leaf.detach(), gradient.to(self._device)
        for part in unfinished.parts(self.execution.at_once):
            with self._accumulation.of(unfinished):
                inputs, outputs = self._run(leaf[part.bounds])
                self._accumulation.backward(inputs, outputs, gradient[part.bounds].to(outputs.dtype))
            unfinished.by_inputs.append(inputs.grad)
        return self._finished(unfinished)

    def last_stage(self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf) -> Learned:
        """Mean cross-entropy in nats per token, and the gradient by the inputs; accumulates those of parameters.

        The loss is on the device, which may not have computed it yet. Raises `OddLoss` for one above `most`.
        """
        return self._learn(self._run, inputs, labels, most=most)

    def head(
        self, inputs: torch.Tensor, labels: torch.Tensor, learns: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the first stage of a ring on what comes back from the last one, as `last_stage`.

        Without `learns` the parameters get no gradient of it.
        """
        loss, by_inputs = self._learn(self._run_head, inputs, labels, learns)
        assert by_inputs is not None
        return loss, by_inputs

    @torch.no_grad()
    def evaluate(
        self, inputs: torch.Tensor, is_back: bool = False, cache: KeyValues | None = None
    ) -> torch.Tensor:
        """The stage's outputs under the slow weights φ, whatever θ is at; the rest as of `Stage.forward`."""
        return torch.cat(list(self.evaluate_slices(inputs, is_back, cache)))

    @torch.no_grad()
    def run_under(self, weights: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        """The stage's outputs, or logits where the model ends, under other weights, by the parameters' names.

        In the precision of training: what two weights' outputs differ by are differences of what is trained.
        """
        with self.execution.autocast(self._device):
            outputs = torch.func.functional_call(self.stage, dict(weights), (inputs.to(self._device),))
        return torch.as_tensor(outputs)

    @torch.no_grad()
    def evaluate_slices(
        self,
        inputs: torch.Tensor,
        is_back: bool = False,
        cache: KeyValues | None = None,
        gives_logits: bool = True,
    ) -> Iterator[torch.Tensor]:
        """Run `evaluate` on as many sequences at a time as training computes at once; a cache is of one sequence."""
        for part in self._slices(inputs.to(self._device)):
            arguments = (part, is_back, cache, gives_logits)
            outputs = torch.func.functional_call(self.stage, self._slow_weights, arguments)
            yield torch.as_tensor(outputs)

    def evaluate_loss(self, inputs: torch.Tensor, labels: torch.Tensor, is_back: bool = False) -> float:
        """The sum over the tokens of their cross-entropy in nats under φ, where the model ends."""
        total, done = 0.0, 0
        name = next(name for name, p in self.stage.named_parameters() if p is self.stage.head)
        for hidden in self.evaluate_slices(inputs, is_back, gives_logits=False):
            targets = labels[done : done + len(hidden)].flatten().to(self._device)
            total += summed_loss(hidden.flatten(0, 1), self._slow_weights[name], targets).item()
            done += len(hidden)
        return total

    def _run(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = inputs if self.stage.is_first else inputs.detach().requires_grad_()
        if self._working is not None:
            self._working.refresh()
        with self.execution.autocast(self._device):
            return leaf, self._compute(leaf)

    def _run_head(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = inputs.detach().requires_grad_()
        if self._working is not None:
            self._working.refresh()
        return leaf, leaf

    def _learn(
        self,
        run: Run,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        learns: bool = True,
        most: float = math.inf,
    ) -> Learned:
        """Run forward and backward slice by slice, with the mean loss of all.

        Raises `NonFinite` for a loss that is NaN or infinite, and `OddLoss` as soon as that of all slices is certain
        to be above `most`; the parameters' gradients are then as before. After any other failure the same call with
        the same `inputs` goes on where this one ended.
        """
        self.has_run = True
        unfinished = self._begun(inputs)
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        try:
            for part in unfinished.parts(self.execution.at_once):
                share = len(part) / len(inputs)
                with self._accumulation.of(unfinished):
                    leaf, hidden = run(inputs[part.bounds])
                    head = self._usable_loss(hidden, labels[part.bounds], learns)
                    loss = head.loss * share
                    unfinished.require_at_most(most, loss.item(), share)
                    self._add_slopes(leaf, hidden, head, share)
                unfinished.losses.append(loss)
                unfinished.by_inputs.append(leaf.grad)
                del hidden, head  # before the next slice takes as much
        except (NonFinite, OddLoss):
            self._unfinished = None
            if learns:
                self._take_back(run, inputs, labels, unfinished.over)
            raise
        loss = torch.stack(unfinished.losses).sum()
        return loss, self._finished(unfinished)

    def _begun(self, inputs: torch.Tensor) -> Unfinished:
        """The rest of a pass of the same microbatch that failed; all of the microbatch where there was none."""
        unfinished = self._unfinished
        if unfinished is None or unfinished.inputs is not inputs:
            self._is_spoiled = self.is_spoiled
            unfinished = self._unfinished = Unfinished(inputs, deque([Rows(0, len(inputs))]))
        return unfinished

    def _finished(self, unfinished: Unfinished) -> torch.Tensor | None:
        """The gradient by the inputs of all parts."""
        by_inputs = _joined(unfinished.by_inputs)
        self._unfinished = None
        return by_inputs

    def _usable_loss(self, hidden: torch.Tensor, labels: torch.Tensor, learns: bool) -> HeadLoss:
        head = self._head_loss(hidden, labels, learns)
        if not math.isfinite(head.loss.item()):
            raise NonFinite("the loss")
        return head

    def _head_loss(self, hidden: torch.Tensor, labels: torch.Tensor, learns: bool) -> HeadLoss:
        weight, vocabulary = self._weight_of_head(), len(self.stage.head)
        assert weight is not None
        softmax = self.compiled.softmax if self.execution.compiles and self.compiled else plain_softmax
        flat = hidden.detach().flatten(0, 1)
        return loss_with_gradients(flat, weight, labels.flatten(), vocabulary, learns, softmax)

    def _weight_of_head(self) -> torch.Tensor | None:
        if not self._makes_logits:
            return None
        return self.stage.head if self._working is None else self._working.head

    def _add_slopes(self, leaf: torch.Tensor, hidden: torch.Tensor, head: HeadLoss, share: float) -> None:
        """Run backward through head and stage, times `share`; if the head learns nothing, by the inputs alone."""
        by_hidden = (head.by_hidden * share).view_as(hidden)
        if head.by_weight is None:
            backward(hidden, by_hidden, [leaf])
            return
        self._accumulation.add_to_head(self.stage.head, head.by_weight, share)
        self._accumulation.backward(leaf, hidden, by_hidden)

    def _take_back(self, run: Run, inputs: torch.Tensor, labels: torch.Tensor, over: Sequence[Rows]) -> None:
        """Subtract the gradients of the first parts of a microbatch that turned out to be worthless."""
        before, self._is_spoiled = self._is_spoiled, True  # unless it comes to its end
        again = Unfinished(inputs, deque(Rows(part.start, part.stop) for part in over))
        for part in again.parts(at_once=0):
            with self._accumulation.of(again):
                leaf, hidden = run(inputs[part.bounds])
                head = self._head_loss(hidden, labels[part.bounds], learns=True)
                self._add_slopes(leaf, hidden, head, -len(part) / len(inputs))
        self._is_spoiled = before

    def _slices(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Slices of a microbatch's first dimension, as many sequences each as are computed at once."""
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
