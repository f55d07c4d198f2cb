"""Reading a contribution beside the own weights, and telling the partner which blocks of it could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from node.model.fragment import Fragment
from node.rounds.contribution import IncomingUpdate
from protocol.codecs.codec import Encoded, as_read
from protocol.codecs.kernels import BLOCK
from protocol.errors import CodecError

WORD = 32  # bits of an entry


@dataclass(frozen=True)
class Reading:
    """The outcome of reading each block, [blocks]."""

    found: torch.Tensor  # how far the partner is away: the root mean square of a value's difference
    unread: torch.Tensor  # bool


@torch.no_grad()
def read_piece_by_piece(partners: IncomingUpdate, own: Fragment, pair: str) -> Reading:
    """Read all of the partner's z, which must be there; on the compute thread, while the own z is what was sent."""
    pieces = [
        found
        for group in own.in_groups(range(own.pieces))
        for found in partners.read_beside(group, own, pair)
    ]
    return Reading(torch.cat([found for found, _ in pieces]), torch.cat([unread for _, unread in pieces]))


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
