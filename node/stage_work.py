"""What the compute thread does with one microbatch: decode and check, compute, encode. Synchronous."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

from node.replica import Replica
from protocol.codec import Encoded, encode
from protocol.errors import Refused
from protocol.manifest import Manifest
from protocol.rpc import Request

Load: TypeAlias = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # gives (inputs, labels)


class StageWork:
    """Holds no state of its own: the replica is changed by backward passes only."""

    def __init__(self, manifest: Manifest, replica: Replica) -> None:
        self._manifest = manifest
        self._replica = replica

    def decoded(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of a request, checked. Raises `Refused` for what does not fit this stage."""
        try:
            inputs, labels = request.tensors()
        except ValueError:
            raise Refused("bad-shape", "two tensors are expected: inputs and labels") from None
        model, data = self._manifest.model, self._manifest.data
        shape = (labels.shape[0] if labels.dim() else 0, data.sequence_tokens)
        expected = shape if self._replica.stage.is_first else (*shape, model.hidden_size)
        if not shape[0] or tuple(labels.shape) != shape or tuple(inputs.shape) != expected:
            raise Refused("bad-shape", f"expected inputs of shape {expected}")
        for tokens in (labels, inputs) if self._replica.stage.is_first else (labels,):
            if tokens.is_floating_point() or int(tokens.min()) < 0 or int(tokens.max()) >= model.vocab_size:
                raise Refused("bad-shape", "tokens are outside the vocabulary")
        if not self._replica.stage.is_first:
            inputs = inputs.float()
            if not bool(torch.isfinite(inputs).all()):
                raise Refused("non-finite", "the activations hold NaN or infinity")
        return inputs, labels.long()

    def forward(self, load: Load) -> tuple[torch.Tensor, torch.Tensor, list[Encoded]]:
        inputs, labels = load()
        leaf, outputs = self._replica.forward(inputs)
        return leaf, outputs, self._parcel(outputs, labels, self._manifest.wire.activations)

    def backward(self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor) -> list[Encoded]:
        by_inputs = self._replica.backward(leaf, outputs, gradient)
        return self._answer_tensors(by_inputs)

    def last_stage(self, load: Load) -> tuple[float, list[Encoded]]:
        loss, by_inputs = self._replica.loss_and_backward(*load())
        return loss, self._answer_tensors(by_inputs)

    def evaluate(self, load: Load) -> list[Encoded]:
        inputs, labels = load()
        return self._parcel(self._replica.evaluate(inputs), labels, "fp32")

    def evaluate_last(self, load: Load) -> tuple[float, int]:
        inputs, labels = load()
        logits = self._replica.evaluate(inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum").item(), labels.numel()

    def _parcel(self, outputs: torch.Tensor, labels: torch.Tensor, codec: str) -> list[Encoded]:
        return [encode(outputs.detach().cpu(), codec), encode(labels.to(torch.int32), "int32")]

    def _answer_tensors(self, by_inputs: torch.Tensor | None) -> list[Encoded]:
        if by_inputs is None:
            return []
        return [encode(by_inputs.cpu(), self._manifest.wire.gradients)]
