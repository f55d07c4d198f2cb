"""The codecs mod4, mod3 and mod2 as tensors that travel: weights for a replica that holds nearly the same ones.

What `protocol.codecs.codec` is for the others. Everything that raises here raises `CodecError`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from protocol.codecs import lattice
from protocol.codecs.codec import Encoded, nbytes_of
from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import LatticePoints
from protocol.codecs.near_codecs import BITS
from protocol.errors import CodecError

CHECKSUM_BYTES = 3
_OTHER_SHAPE = "a contribution does not have the shape of this stage"


def seeds_of(pair: str, indices: Iterable[int]) -> list[int]:
    """Seeds of the dither for pieces of the contributions under a pair's name; both partners have the same."""
    digests = (hashlib.sha256(f"{pair} {index}".encode()).digest() for index in indices)
    return [int.from_bytes(digest[:4], "little") for digest in digests]


def encode_near(flat: Tensor, codec: str, cells: Tensor, seeds: Sequence[int], entries: int) -> list[Encoded]:
    """The bytes of float32 `flat` [n], of any device, each block with at least its cell of `cells` [blocks].

    It is one piece for each of the seeds, of `entries` values, the last of the rest; the bytes are the same whether
    several come at once or one by one. Raises `CodecError` for NaN, infinity and values beyond 2^40.
    """
    flat = flat.detach()
    points = lattice.to_lattice(flat, cells, seeds, BITS[codec], entries // BLOCK)
    checksums = points.checksums.cpu().view(torch.uint8).view(-1, 4)[:, :CHECKSUM_BYTES]
    parts = [_bytes_of(part) for part in (points.cells.cpu(), checksums, points.remainders.cpu())]
    cuts = [(start, min(start + entries, flat.numel())) for start in range(0, flat.numel(), entries)]
    return [
        Encoded(codec, (stop - start,), tuple(_cut(part, start, stop, flat.numel()) for part in parts))
        for start, stop in cuts
    ]


class NearPieces:
    """Pieces [n] in one codec for near replicas, as they travelled, with what their dither is drawn from."""

    def __init__(self, pieces: Sequence[Encoded], seeds: Sequence[int], entries: int) -> None:
        """`seeds` and `entries` are those of `encode_near`. Raises `CodecError` for other sizes."""
        self._seeds, self._blocks_each = seeds, entries // BLOCK
        if any(piece.shape != (entries,) for piece in pieces[:-1]):
            raise CodecError(_OTHER_SHAPE)
        parts = [_parts_of(piece) for piece in pieces]
        cells, checksums, remainders = (torch.cat(part) for part in zip(*parts, strict=True))
        count = sum(math.prod(piece.shape) for piece in pieces)
        self._points = LatticePoints(BITS[pieces[0].codec], count, cells, checksums, remainders)

    def as_sent(self, flat: Tensor) -> Tensor:
        """The values [n] that every receiver able to read a block reads of it; made of `flat`, unchanged since."""
        return lattice.as_sent(flat, self._points.on(flat.device), self._seeds, self._blocks_each)

    def read_beside(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The values that a receiver that holds `own` [n] reads, and whether each block could be read, bool [blocks].

        What is unread has the receiver's own values. Raises `CodecError` where `own` has another size.
        """
        if own.numel() != self._points.count:
            raise CodecError(_OTHER_SHAPE)
        return lattice.read_beside(own, self._points.on(own.device), self._seeds, self._blocks_each)

    @property
    def rounding(self) -> Tensor:
        """The root mean square of what is lost of a value, of each block, on the host, [blocks]: c/√12."""
        return lattice.cells_of(self._points) / math.sqrt(12)


def _parts_of(encoded: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """Cells, checksums and remainders as `LatticePoints` has them, on the host."""
    if encoded.nbytes != nbytes_of(encoded.codec, encoded.shape):
        raise CodecError(f"{encoded.nbytes} bytes received for a tensor in {encoded.codec}")
    blocks = -(-math.prod(encoded.shape) // BLOCK)
    raw = torch.frombuffer(bytearray().join(encoded.buffers), dtype=torch.uint8)
    cells, checksums, remainders = torch.split(
        raw, [blocks, CHECKSUM_BYTES * blocks, len(raw) - blocks * (1 + CHECKSUM_BYTES)]
    )
    whole = torch.nn.functional.pad(checksums.view(-1, CHECKSUM_BYTES), (0, 1)).contiguous()
    return cells, whole.view(torch.int32).view(-1), remainders


def _cut(part: memoryview, start: int, stop: int, values: int) -> memoryview:
    """The bytes from entry `start` to `stop` of values whose blocks all have equally many."""
    size = part.nbytes // -(-values // BLOCK)
    return part[start // BLOCK * size : -(-stop // BLOCK) * size]


def _bytes_of(part: Tensor) -> memoryview:
    return part.contiguous().view(-1).numpy().data.toreadonly()
