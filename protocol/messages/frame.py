"""A frame as it was read: what a message came in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from protocol.codecs.codec import Encoded, TensorSpec, as_read
from protocol.ground import Buffer


class FrameType(IntEnum):
    REQUEST = 0
    REPLY = 1
    REFUSAL = 2
    PROGRESS = 3  # how far a request is whose answer takes long; body as of `messages.Progress`
    CANCEL = 4  # the caller gave a request up


@dataclass(frozen=True)
class Frame:
    type: FrameType
    request_id: int
    kind: str
    body: object  # msgpack value; a message's fields, or a refusal's reason
    specs: tuple[TensorSpec, ...]
    payload: Buffer
    began: float = 0.0  # when its first bytes came, on the clock of the `FrameWatch`

    def tensors(self) -> list[torch.Tensor]:
        """Decode the payload; what is not compressed shares its memory. Raises `CodecError`."""
        return [as_read(tensor) for tensor in self.encoded()]

    def encoded(self) -> list[Encoded]:
        """The tensors as they came, over the payload's memory."""
        tensors, start = [], 0
        view = memoryview(self.payload)
        for spec in self.specs:
            tensors.append(Encoded(spec.codec, spec.shape, (view[start : start + spec.nbytes],)))
            start += spec.nbytes
        return tensors
