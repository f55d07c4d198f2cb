"""The codecs mod4, mod3 and mod2 as tensors that travel: weights for a replica that holds nearly the same ones.

What `protocol.codec` is for the others. Everything that raises here raises `CodecError`.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from protocol import lattice
from protocol.codec import Encoded, nbytes_of
from protocol.errors import CodecError
from protocol.kernels import BLOCK
from protocol.lattice import LatticePoints
from protocol.near_codecs import BITS

CHECKSUM_BYTES = 3


def seed_of(pair: str, index: int) -> int:
    """Of the dither for piece `index` of the contributions under a pair's name; both partners have the same."""
    return int.from_bytes(hashlib.sha256(f"{pair} {index}".encode()).digest()[:4], "little")


def encode_near(flat: Tensor, codec: str, cells: Tensor, seed: int) -> Encoded:
    """The bytes of float32 `flat` [n], of any device, each block with at least its cell of `cells` [blocks].

    Raises `CodecError` for NaN, infinity and values beyond 2^40.
    """
    points = lattice.to_lattice(flat.detach(), cells, seed, BITS[codec])
    checksums = points.checksums.cpu().view(torch.uint8).view(-1, 4)[:, :CHECKSUM_BYTES]
    parts = (points.cells.cpu(), checksums, points.remainders.cpu())
    return Encoded(codec, (flat.numel(),), tuple(_bytes_of(part) for part in parts))


def as_sent(flat: Tensor, sent: Encoded, seed: int) -> Tensor:
    """What every receiver that can read a block reads of it, [n]; `sent` was made of `flat`, which is unchanged."""
    return lattice.as_sent(flat, points_in(sent, flat.device), seed)


def read_beside(own: Tensor, received: Encoded, seed: int) -> tuple[Tensor, Tensor]:
    """What is read of it by a receiver that holds `own` [n], and whether each block could be, bool [blocks].

    What is unread has the receiver's own values. Raises `CodecError` for another shape than that of `own`.
    """
    if received.shape != tuple(own.shape):
        raise CodecError("a contribution does not have the shape of this stage")
    return lattice.read_beside(own, points_in(received, own.device), seed)


def rounding_of(encoded: Encoded) -> Tensor:
    """The root mean square of what is lost of a value, of each block, [blocks]: c/√12."""
    return lattice.cells_of(points_in(encoded, torch.device("cpu"))) / math.sqrt(12)


def points_in(encoded: Encoded, device: torch.device) -> LatticePoints:
    """The points that travelled, on a device. Raises `CodecError` where bytes are missing or too many."""
    bits, count = BITS[encoded.codec], math.prod(encoded.shape)
    if encoded.nbytes != nbytes_of(encoded.codec, encoded.shape):
        raise CodecError(f"{encoded.nbytes} bytes received for a tensor in {encoded.codec}")
    blocks = -(-count // BLOCK)
    raw = torch.frombuffer(bytearray().join(encoded.buffers), dtype=torch.uint8)
    rest = (1 + CHECKSUM_BYTES) * blocks
    cells, checksums, remainders = raw[:blocks], raw[blocks:rest], raw[rest:]
    whole = torch.nn.functional.pad(checksums.view(-1, CHECKSUM_BYTES), (0, 1)).contiguous()
    return LatticePoints(
        bits, count, cells.to(device), whole.view(torch.int32).view(-1).to(device), remainders.to(device)
    )


def _bytes_of(part: Tensor) -> memoryview:
    return part.contiguous().view(-1).numpy().data.toreadonly()
