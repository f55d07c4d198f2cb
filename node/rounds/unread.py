"""The message that tells a partner which blocks of its contribution could not be read: a bit for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protocol.codecs.codec import Encoded, as_read
from protocol.codecs.kernels import BLOCK
from protocol.errors import CodecError

WORD = 32  # bits of an entry


def bits_of(unread: torch.Tensor) -> torch.Tensor:
    """int32 [⌈blocks/32⌉] of bool [blocks]: block b in bit b mod 32 of entry b // 32."""
    rows = torch.nn.functional.pad(unread, (0, -len(unread) % WORD)).view(-1, WORD).to(torch.int64)
    words = (rows << torch.arange(WORD)).sum(dim=1)
    return (words - (words >> (WORD - 1) << WORD)).to(torch.int32)


def unread_in(tensors: Sequence[Encoded], parameters: int) -> torch.Tensor:
    """bool [blocks] of what a partner sent as `bits_of`. Raises `CodecError` for anything else."""
    blocks = -(-parameters // BLOCK)
    if [(t.codec, t.shape) for t in tensors] != [("int32", (-(-blocks // WORD),))]:
        raise CodecError("what was unread does not have the shape of this stage")
    bits = as_read(tensors[0]).view(-1, 1) >> torch.arange(WORD) & 1
    return bits.view(-1)[:blocks].to(torch.bool)
