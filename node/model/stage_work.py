"""The stage's work on one microbatch, on the compute thread: passes on the device, and results encoded for peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from node.model.oom_fallback import MemoryPolicy, NoFallback
from node.model.passes import Learned, Passes
from node.model.resources import free_caches, is_out_of_memory, retried
from node.model.self_check import SelfCheck
from node.model.transfer import DeviceTransfer, Here, Pending
from protocol.codecs.codec import Encoded, encode, require_finite_values, torch_type
from protocol.codecs.device_codec import NotSendable, packed, unpacked
from protocol.errors import CodecError, NonFinite
from protocol.run.manifest import Manifest

LossAndAnswer: TypeAlias = tuple[float, list[Encoded]]  # the loss, and the gradient for the stage before


class StageWork:
    """Runs the stage's passes and encodes what goes to peers. Backward passes add to the gradients; else no state.

    What goes to peers is `Pending`: on a GPU it is copied and encoded while the next microbatch is computed.
    """

    def __init__(
        self,
        manifest: Manifest,
        passes: Passes,
        transfer: DeviceTransfer,
        fallback: MemoryPolicy | None = None,
    ) -> None:
        """Leave running out of memory to the caller when there is no `fallback`, as in a dry run."""
        self._manifest = manifest
        self._passes = passes
        self.transfer = transfer
        self._fallback = fallback or NoFallback()
        self.self_check = SelfCheck()

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Pending[list[Encoded]]]:
        """Run the layers; returns leaf and outputs for `backward`, and what the next stage gets.

        Inputs are tokens [sequences, tokens] or activations [sequences, tokens, hidden], labels [sequences, tokens].
        Raises `Unrepeatable` when it was computed again and came out differently.
        """
        leaf, outputs = self._fallback.forward(self._forward, inputs)
        self._check(outputs, inputs)
        activations = self._outgoing(outputs, self._manifest.wire.activations, "activations")
        self.transfer.keep_pace()
        if not outputs.requires_grad:  # in slices nothing of them is needed any more
            outputs = outputs.new_empty(0)
        return leaf, outputs, self.transfer.hand_over(_ActivationsAndLabels(activations, labels))

    def backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor, loss: float = math.nan
    ) -> Pending[LossAndAnswer]:
        """Backpropagate `gradient` [sequences, tokens, hidden] and add to the parameters' gradients.

        `loss` is what a later stage found, and is passed on.
        """
        again = self._passes.backward_again
        by_inputs = self._fallback.backward(self._backward, again, leaf, outputs, gradient)
        self._passes.probes.keep(leaf, gradient)
        answer = self._answer(by_inputs)
        self.transfer.keep_pace()
        return self.transfer.hand_over(_LossAndAnswer(Here(loss), answer))

    def last_stage(
        self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf
    ) -> Pending[LossAndAnswer]:
        """Run forward and backward.

        Raises `NonFinite`, and adds no gradients, when the loss is not finite; `OddLoss` when it is above `most`.
        """
        learned = self._learn(self._passes.last_stage, inputs, labels, most)
        self._passes.probes.keep(inputs, labels)
        return learned

    def head(self, inputs: torch.Tensor, labels: torch.Tensor, learns: bool) -> Pending[LossAndAnswer]:
        """Run the head in a ring's first stage, as `last_stage`. Without `learns` parameters get no gradient."""
        return self._learn(self._passes.head, inputs, labels, learns)

    def evaluate(self, inputs: torch.Tensor, labels: torch.Tensor) -> list[Encoded]:
        """The activations under the slow weights, with the labels, for the next stage."""
        return [_encoded(self._passes.evaluate(inputs).cpu(), "fp32", "activations"), _as_int32(labels)]

    def evaluate_last(
        self, inputs: torch.Tensor, labels: torch.Tensor, is_back: bool = False
    ) -> tuple[float, int]:
        """The sum of the loss under the slow weights in nats, and over how many tokens."""
        return self._passes.evaluate_loss(inputs, labels, is_back), labels.numel()

    def _learn(
        self, learn: Callable[..., Learned], inputs: torch.Tensor, labels: torch.Tensor, *how: float
    ) -> Pending[LossAndAnswer]:
        inputs, labels = self.transfer.to_device(inputs), self.transfer.to_device(labels)
        loss, by_inputs = self._fallback.run(learn, inputs, labels, *how)
        answer, loss_copy = self._answer(by_inputs), self._to_host(loss)
        self.transfer.keep_pace()
        return self.transfer.hand_over(_LossAndAnswer(_FiniteLoss(loss_copy), answer))

    def _forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._passes.forward(self.transfer.to_device(inputs))

    def _check(self, outputs: torch.Tensor, inputs: torch.Tensor) -> None:
        """Compute again and compare, if it is time. Where memory lacks for a second graph it is left out.

        Not through the fallback, which would give up a microbatch in flight for good.
        """
        try:
            self.self_check.compare(outputs, lambda: retried(self._forward, inputs)[1])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.self_check.skipped += 1
            free_caches()

    def _backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        return self._passes.backward(leaf, outputs, self.transfer.to_device(gradient))

    def _to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Pending[torch.Tensor]:
        """Begin to copy a result to the host. Without memory for that it comes as it is, at once, and is not lost."""
        try:
            return retried(self.transfer.to_host, tensor, dtype)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return Here(tensor.detach().cpu())

    def _outgoing(self, tensor: torch.Tensor, codec: str, what: str) -> Pending[Encoded]:
        """A tensor in a peer's bytes, which a GPU makes itself where it has memory for them."""
        if self.transfer.encodes_there:
            try:
                return _EncodedThere(*retried(self._packed, tensor, codec), codec, tensor.shape, what)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        return _EncodedHere(self._to_host(tensor, torch_type(codec)), codec, what)

    def _packed(
        self, tensor: torch.Tensor, codec: str
    ) -> tuple[Pending[torch.Tensor], Pending[torch.Tensor]]:
        made = packed(tensor, codec)
        return self.transfer.to_host(made.raw), self.transfer.to_host(made.flag)

    def _answer(self, by_inputs: torch.Tensor | None) -> Pending[Encoded] | None:
        """The gradient that the stage before gets; the first stage has none."""
        if by_inputs is None:
            return None
        return self._outgoing(by_inputs, self._manifest.wire.gradients, "gradients")


# --- results on their way to the host ---------------------------------------------------------------


class _EncodedHere(Pending[Encoded]):
    """A tensor that the host encodes. `wait` raises `NonFinite` for what the peer would refuse."""

    def __init__(self, copy: Pending[torch.Tensor], codec: str, what: str) -> None:
        self._copy, self._codec, self._what = copy, codec, what

    def wait(self) -> Encoded:
        return _encoded(self._copy.wait(), self._codec, self._what)


class _EncodedThere(Pending[Encoded]):
    """A tensor that the device has encoded. `wait` raises `NonFinite` for what the peer would refuse."""

    def __init__(
        self,
        raw: Pending[torch.Tensor],
        flag: Pending[torch.Tensor],
        codec: str,
        shape: torch.Size,
        what: str,
    ) -> None:
        self._raw, self._flag, self._codec, self._shape, self._what = raw, flag, codec, shape, what

    def wait(self) -> Encoded:
        try:
            return unpacked(self._codec, self._shape, self._raw.wait(), self._flag.wait())
        except NotSendable as refusal:
            raise NonFinite(f"the {self._what}", _overflows(self._codec, refusal.is_nan)) from None


class _ActivationsAndLabels(Pending[list[Encoded]]):
    """The activations and labels for the next stage."""

    def __init__(self, activations: Pending[Encoded], labels: torch.Tensor) -> None:
        self._activations, self._labels = activations, labels

    def wait(self) -> list[Encoded]:
        return [self._activations.wait(), _as_int32(self._labels)]


class _LossAndAnswer(Pending[LossAndAnswer]):
    """The loss and the gradient for the stage before."""

    def __init__(self, loss: Pending[float], answer: Pending[Encoded] | None) -> None:
        self._loss, self._answer = loss, answer

    def wait(self) -> LossAndAnswer:
        return self._loss.wait(), [] if self._answer is None else [self._answer.wait()]


class _FiniteLoss(Pending[float]):
    """The loss. `wait` raises `NonFinite`: the microbatch counts, and its sender must not learn from it."""

    def __init__(self, copy: Pending[torch.Tensor]) -> None:
        self._copy = copy

    def wait(self) -> float:
        loss = float(self._copy.wait().item())
        if not math.isfinite(loss):
            raise NonFinite("the loss")
        return loss


def _as_int32(labels: torch.Tensor) -> Encoded:
    return encode(labels.to(torch.int32), "int32")


def _encoded(tensor: torch.Tensor, codec: str, what: str) -> Encoded:
    """Encode a tensor for a peer. Raises `NonFinite` for what it would refuse: this node finds that out itself."""
    try:
        encoded = encode(tensor, codec)
        require_finite_values(encoded)
    except CodecError:
        raise NonFinite(f"the {what}", _overflows(codec, bool(tensor.isnan().any()))) from None
    return encoded


def _overflows(codec: str, is_nan: bool) -> str:
    """The codec whose range was too small, or '' where the values themselves are to blame."""
    return "" if is_nan or codec in ("fp32", "bf16") else codec
