"""What the compute thread does with one microbatch: decode and check, compute, encode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

from node.model.device_transfer import DeviceTransfer, PendingResult
from node.model.passes import Learned, Passes
from node.model.sparing import Sparing
from protocol.codec import Encoded, encode, require_finite_values, torch_type
from protocol.errors import CodecError, NonFinite, Refused
from protocol.manifest import Manifest
from protocol.rpc import Request

Load: TypeAlias = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # gives (inputs, labels)
LossAndAnswer: TypeAlias = tuple[float, list[Encoded]]  # the loss, and the gradient for the stage before


class StageWork:
    """Holds no state of its own: backward passes alone change something, the stage's gradients.

    What goes to peers is a `PendingResult`: on a GPU it is copied and encoded while the next microbatch is computed.
    """

    def __init__(
        self, manifest: Manifest, passes: Passes, copies: DeviceTransfer, sparing: Sparing | None = None
    ) -> None:
        """Without `sparing` memory that runs out is the caller's to see, as in a rehearsal."""
        self._sparing = sparing
        self._manifest = manifest
        self._passes = passes
        self._copies = copies

    def decoded(
        self, request: Request, is_back: bool = False, may_be_short: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of a request, checked. Raises `Refused` for what does not fit this stage.

        With `is_back` they come from the last stage, in a ring. Sequences have the run's length; with `may_be_short`
        at most that.
        """
        try:
            inputs, labels = request.tensors()
        except ValueError:
            raise Refused("bad-shape", "two tensors are expected: inputs and labels") from None
        model, data = self._manifest.model, self._manifest.data
        tokens = data.sequence_tokens
        if may_be_short and labels.dim() == 2 and labels.numel():
            tokens = min(tokens, labels.shape[1])
        shape = (labels.shape[0] if labels.dim() else 0, tokens)
        are_tokens = self._passes.stage.is_first and not is_back
        expected = shape if are_tokens else (*shape, model.hidden_size)
        if not 0 < shape[0] <= self._manifest.inner.sequences:  # more would take memory that is not there
            raise Refused("bad-shape", f"expected at most {self._manifest.inner.sequences} sequences")
        if tuple(labels.shape) != shape or tuple(inputs.shape) != expected:
            raise Refused("bad-shape", f"expected inputs of shape {expected}")
        for ids in (labels, inputs) if are_tokens else (labels,):
            if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
                raise Refused("bad-shape", "tokens are outside the vocabulary")
        if not are_tokens:
            inputs = inputs.float()
            if not bool(torch.isfinite(inputs).all()):
                raise Refused("non-finite", "the activations hold NaN or infinity")
        return inputs, labels.long()

    def forward(self, load: Load) -> tuple[torch.Tensor, torch.Tensor, PendingResult[list[Encoded]]]:
        inputs, labels = load()
        leaf, outputs = self._forward(inputs)
        codec = self._manifest.wire.activations
        fetch = self._copies.to_host(outputs, torch_type(codec))
        self._copies.keep_pace()
        if not outputs.requires_grad:  # in slices nothing of them is needed any more
            outputs = outputs.new_empty(0)
        return leaf, outputs, self._copies.landing(lambda: self._parcel(fetch(), labels, codec))

    def backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> PendingResult[list[Encoded]]:
        by_inputs = self._backward(leaf, outputs, gradient)
        answer = self._answer(by_inputs)
        self._copies.keep_pace()
        return self._copies.landing(answer)

    def last_stage(self, load: Load) -> PendingResult[LossAndAnswer]:
        """Forward and backward. Raises `NonFinite` for a loss that is none: nothing of it is in the gradients."""
        inputs, labels = (self._copies.to_device(tensor) for tensor in load())
        loss, by_inputs = self._whole(lambda: self._passes.last_stage(inputs, labels))
        answer, fetch_loss = self._answer(by_inputs), self._copies.to_host(loss)
        self._copies.keep_pace()
        return self._copies.landing(lambda: (_finite(fetch_loss().item()), answer()))

    def head(self, load: Load, learns: bool) -> PendingResult[LossAndAnswer]:
        """As `last_stage`, in a ring at the first stage."""
        inputs, labels = (self._copies.to_device(tensor) for tensor in load())
        loss, by_inputs = self._whole(lambda: self._passes.head(inputs, labels, learns))
        answer, fetch_loss = self._answer(by_inputs), self._copies.to_host(loss)
        self._copies.keep_pace()
        return self._copies.landing(lambda: (_finite(fetch_loss().item()), answer()))

    def _forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def work() -> tuple[torch.Tensor, torch.Tensor]:
            return self._passes.forward(self._copies.to_device(inputs))

        if self._sparing is None:
            return work()
        leaf, outputs = self._sparing.forward(work)
        if outputs.requires_grad:
            self._sparing.holds(outputs)
        return leaf, outputs

    def _backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        def work() -> torch.Tensor | None:
            return self._passes.backward(leaf, outputs, self._copies.to_device(gradient))

        if self._sparing is None:
            return work()
        return self._sparing.backward(work, lambda: self._passes.backward_again(leaf, gradient))

    def _whole(self, work: Callable[[], Learned]) -> Learned:
        return work() if self._sparing is None else self._sparing.whole(work)

    def evaluate(self, load: Load) -> list[Encoded]:
        inputs, labels = load()
        return self._parcel(self._passes.evaluate(inputs).cpu(), labels, "fp32")

    def evaluate_last(self, load: Load, is_back: bool = False) -> tuple[float, int]:
        inputs, labels = load()
        total, done = 0.0, 0
        for logits in self._passes.evaluate_slices(inputs, is_back):
            targets = labels[done : done + len(logits)].flatten().to(logits.device)
            total += F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum").item()
            done += len(logits)
        return total, labels.numel()

    def _parcel(self, outputs: torch.Tensor, labels: torch.Tensor, codec: str) -> list[Encoded]:
        return [_encoded(outputs, codec, "activations"), encode(labels.to(torch.int32), "int32")]

    def _answer(self, by_inputs: torch.Tensor | None) -> Callable[[], list[Encoded]]:
        """What to call for the gradient that the stage before gets; the first stage has none."""
        if by_inputs is None:
            return list
        codec = self._manifest.wire.gradients
        fetch = self._copies.to_host(by_inputs, torch_type(codec))
        return lambda: [_encoded(fetch(), codec, "gradients")]


def _finite(loss: float) -> float:
    """Raises `NonFinite`: the microbatch counts, and its sender must not learn from it."""
    if not math.isfinite(loss):
        raise NonFinite("the loss")
    return loss


def _encoded(tensor: torch.Tensor, codec: str, what: str) -> Encoded:
    """For a peer. Raises `NonFinite` for what it would refuse: this node finds that out itself."""
    try:
        encoded = encode(tensor, codec)
        require_finite_values(encoded)
    except CodecError:
        overflows = "" if bool(tensor.isnan().any()) or codec in ("fp32", "bf16") else codec
        raise NonFinite(f"the {what}", overflows) from None
    return encoded
