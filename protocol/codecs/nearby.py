"""The codecs mod4, mod3 and mod2 as tensors that travel: weights for a replica that holds nearly the same ones.

What `protocol.codecs.codec` is for the others. Everything that raises here raises `CodecError`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.codecs import lattice
from protocol.codecs.codec import Encoded, nbytes_of
from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import LatticePoints
from protocol.codecs.near_codecs import BITS
from protocol.errors import CodecError

CHECKSUM_BYTES = 3


def seed_of(pair: str, index: int) -> int:
    """Seed of the dither for piece `index` of the contributions under a pair's name; both partners have the same."""
    return int.from_bytes(hashlib.sha256(f"{pair} {index}".encode()).digest()[:4], "little")


def encode_near(flat: Tensor, codec: str, cells: Tensor, seeds: Sequence[int], entries: int) -> list[Encoded]:
    """The bytes of float32 `flat` [n], of any device, each block with at least its cell of `cells` [blocks].

    It is one piece for each of the seeds, of `entries` values, the last of the rest; the bytes are the same whether
    several come at once or one by one. Raises `CodecError` for NaN, infinity and values beyond 2^40.
    """
    flat, bits = flat.detach(), BITS[codec]
    if flat.device.type == "cpu":
        parts = _tensors_of(lattice.to_lattice(flat, cells, seeds, bits, entries // BLOCK))
    else:
        numbers = lattice.numbers_of(seeds, len(cells), flat.device, entries // BLOCK)
        points, is_sendable = lattice.to_lattice_there(flat, cells, numbers, bits)
        tensors = [*_tensors_of(points), is_sendable.view(1).view(torch.uint8)]
        *parts, flag = torch.split(torch.cat(tensors).cpu(), [len(tensor) for tensor in tensors])  # one copy
        lattice.require_sendable(bool(flag), bits)
    views = [_bytes_of(part) for part in parts]
    cuts = [(start, min(start + entries, flat.numel())) for start in range(0, flat.numel(), entries)]
    return [
        Encoded(codec, (stop - start,), tuple(_cut(view, start, stop, flat.numel()) for view in views))
        for start, stop in cuts
    ]


def as_sent(flat: Tensor, sent: Sequence[Encoded], seeds: Sequence[int], entries: int) -> Tensor:
    """The values [n] that every receiver able to read a block reads of it; `sent` was made of `flat`, unchanged."""
    return lattice.as_sent(flat, points_in(sent, flat.device), seeds, entries // BLOCK)


def read_beside(
    own: Tensor, received: Sequence[Encoded], seeds: Sequence[int], entries: int
) -> tuple[Tensor, Tensor]:
    """The values that a receiver that holds `own` [n] reads of these pieces, and whether each block could be read,
    bool [blocks].

    What is unread has the receiver's own values. Raises `CodecError` for other shapes than that of `own` in pieces.
    """
    shapes = [(min(entries, own.numel() - start),) for start in range(0, own.numel(), entries)]
    if [encoded.shape for encoded in received] != shapes:
        raise CodecError("a contribution does not have the shape of this stage")
    return lattice.read_beside(own, points_in(received, own.device), seeds, entries // BLOCK)


def rounding_of(received: Sequence[Encoded]) -> Tensor:
    """The root mean square of what is lost of a value, of each block of these pieces, [blocks]: c/√12."""
    return lattice.cells_of(points_in(received, torch.device("cpu"))) / math.sqrt(12)


def points_in(pieces: Sequence[Encoded], device: torch.device) -> LatticePoints:
    """The points that travelled, on a device: pieces in one codec, of which all but the last are whole blocks.

    Raises `CodecError` where bytes are missing or too many.
    """
    parts = zip(*map(_parts_of, pieces), strict=True)
    raw = torch.frombuffer(bytearray().join(view for part in parts for view in part), dtype=torch.uint8)
    count = sum(math.prod(encoded.shape) for encoded in pieces)
    blocks = sum(-(-math.prod(encoded.shape) // BLOCK) for encoded in pieces)
    sizes = [blocks, CHECKSUM_BYTES * blocks, len(raw) - blocks * (1 + CHECKSUM_BYTES)]
    cells, checksums, remainders = torch.split(lattice.moved(raw, device), sizes)  # all in one copy
    whole = torch.nn.functional.pad(checksums.view(-1, CHECKSUM_BYTES), (0, 1))
    return LatticePoints(BITS[pieces[0].codec], count, cells, whole.view(torch.int32).view(-1), remainders)


def _parts_of(encoded: Encoded) -> tuple[memoryview, memoryview, memoryview]:
    """The bytes of cells, checksums and remainders. Raises `CodecError` for another number of them."""
    if encoded.nbytes != nbytes_of(encoded.codec, encoded.shape):
        raise CodecError(f"{encoded.nbytes} bytes received for a tensor in {encoded.codec}")
    blocks = -(-math.prod(encoded.shape) // BLOCK)
    view = encoded.buffers[0] if len(encoded.buffers) == 1 else memoryview(b"".join(encoded.buffers))
    ends = blocks, blocks * (1 + CHECKSUM_BYTES)
    return view[: ends[0]], view[ends[0] : ends[1]], view[ends[1] :]


def _tensors_of(points: LatticePoints) -> list[Tensor]:
    """Cells, checksums of three bytes and remainders, each uint8 [bytes], on their device."""
    checksums = points.checksums.view(torch.uint8).view(-1, 4)[:, :CHECKSUM_BYTES]
    return [points.cells, checksums.reshape(-1), points.remainders]


def _cut(part: memoryview, start: int, stop: int, values: int) -> memoryview:
    """The bytes from entry `start` to `stop` of values whose blocks all have equally many."""
    size = part.nbytes // -(-values // BLOCK)
    return part[start // BLOCK * size : -(-stop // BLOCK) * size]


def _bytes_of(part: Tensor) -> memoryview:
    return part.contiguous().view(-1).numpy().data.toreadonly()
