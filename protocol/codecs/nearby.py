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


class NearPieces:
    """Pieces [n] in one codec for near replicas, as they travelled, with what their dither is drawn from."""

    def __init__(self, pieces: Sequence[Encoded], seeds: Sequence[int], entries: int) -> None:
        """`seeds` and `entries` are those of `encode_near`. Raises `CodecError` for other sizes."""
        self._seeds, self._blocks_each = seeds, entries // BLOCK
        if any(piece.shape != (entries,) for piece in pieces[:-1]):
            raise CodecError(_OTHER_SHAPE)
        parts = zip(*map(_parts_of, pieces), strict=True)
        self._raw = torch.frombuffer(
            bytearray().join(view for part in parts for view in part), dtype=torch.uint8
        )
        self._bits, self._count = BITS[pieces[0].codec], sum(math.prod(piece.shape) for piece in pieces)
        blocks = sum(-(-math.prod(piece.shape) // BLOCK) for piece in pieces)
        self._sizes = [blocks, CHECKSUM_BYTES * blocks, len(self._raw) - blocks * (1 + CHECKSUM_BYTES)]

    def as_sent(self, flat: Tensor) -> Tensor:
        """The values [n] that every receiver able to read a block reads of it; made of `flat`, unchanged since."""
        return lattice.as_sent(flat, self._points_on(flat.device), self._seeds, self._blocks_each)

    def read_beside(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The values that a receiver that holds `own` [n] reads, and whether each block could be read, bool [blocks].

        What is unread has the receiver's own values. Raises `CodecError` where `own` has another size.
        """
        if own.numel() != self._count:
            raise CodecError(_OTHER_SHAPE)
        return lattice.read_beside(own, self._points_on(own.device), self._seeds, self._blocks_each)

    @property
    def rounding(self) -> Tensor:
        """The root mean square of what is lost of a value, of each block, on the host, [blocks]: c/√12."""
        return lattice.cells_of(self._points_on(torch.device("cpu"))) / math.sqrt(12)

    def _points_on(self, device: torch.device) -> LatticePoints:
        cells, checksums, remainders = torch.split(
            lattice.moved(self._raw, device), self._sizes
        )  # all in one copy
        whole = torch.nn.functional.pad(checksums.view(-1, CHECKSUM_BYTES), (0, 1))
        return LatticePoints(self._bits, self._count, cells, whole.view(torch.int32).view(-1), remainders)


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
