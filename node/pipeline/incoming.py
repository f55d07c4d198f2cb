"""Decodes and checks, on the compute thread, what peers send a stage to compute on, before anything is computed."""

from __future__ import annotations

import torch

from node.model.stage import Stage
from node.model.transfer import DeviceTransfer
from protocol.codecs.codec import FLOATING, Encoded, as_read, bytes_as_tensor, require_finite_values
from protocol.codecs.device_codec import decoded_there
from protocol.errors import CodecError, Refused
from protocol.messages import Message
from protocol.rpc.rpc import Request
from protocol.run.manifest import Manifest


class IncomingTensors:
    """Reads the inputs and labels of requests, and refuses those that do not fit this stage."""

    def __init__(self, manifest: Manifest, stage: Stage, transfer: DeviceTransfer) -> None:
        self._manifest = manifest
        self._stage = stage
        self._transfer = transfer

    def read(
        self, request: Request[Message], is_back: bool = False, may_be_short: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of a request: tokens or float32 activations, and int64 [sequences, tokens].

        With `is_back` they come from the last stage, in a ring. Sequences have the run's length; with `may_be_short`
        at most that. Raises `Refused` for what does not fit this stage.
        """
        try:
            inputs, encoded_labels = request.encoded()
        except ValueError:
            raise Refused("bad-shape", "two tensors are expected: inputs and labels") from None
        labels = as_read(encoded_labels)
        model, data = self._manifest.model, self._manifest.data
        tokens = data.sequence_tokens
        if may_be_short and labels.dim() == 2 and labels.numel():
            tokens = min(tokens, labels.shape[1])
        shape = (labels.shape[0] if labels.dim() else 0, tokens)
        are_tokens = self._stage.is_first and not is_back
        expected = shape if are_tokens else (*shape, model.hidden_size)
        if not 0 < shape[0] <= self._manifest.inner.sequences:  # more would take memory that is not there
            raise Refused("bad-shape", f"expected at most {self._manifest.inner.sequences} sequences")
        if tuple(labels.shape) != shape or tuple(inputs.shape) != expected:
            raise Refused("bad-shape", f"expected inputs of shape {expected}")
        tokens_in = as_read(inputs) if are_tokens else labels
        for ids in (labels, tokens_in):
            if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
                raise Refused("bad-shape", "tokens are outside the vocabulary")
        return tokens_in if are_tokens else self._activations(inputs), labels.long()

    def _activations(self, encoded: Encoded) -> torch.Tensor:
        """Activations as float32, on a GPU made of their bytes there. Raises `Refused` for NaN and infinity.

        That is looked for here, in scales where the codec has some: to ask the GPU would be to wait for it.
        """
        try:
            require_finite_values(encoded)
        except CodecError:
            raise Refused("non-finite", "the activations hold NaN or infinity") from None
        if not self._transfer.encodes_there or encoded.codec not in FLOATING:
            return as_read(encoded).float()
        there = self._transfer.to_device(bytes_as_tensor(encoded))
        return decoded_there(encoded.codec, encoded.shape, there)
