"""A lattice modulo a few bits: a replica's weights for one that holds nearly the same ones.

P. Davies et al., "New Bounds for Distributed Mean Estimation and Variance Reduction", ICLR 2021; for decentralised
SGD G. Nadiradze et al., "Asynchronous Decentralized SGD with Quantized and Local Updates", NeurIPS 2021.

int8 and EDEN carry numbers whose size decides how many bits they need. Two replicas of a stage differ by a hundredth
of that: one sends on which point of a lattice its weights lie modulo 2^bits; the other, whose weights are near, knows
the rest.

A block z of 256 values is rotated as in `codecs.eden`, r = H·(s ⊙ z)/16, which makes any difference of two blocks
nearly Gaussian. With the cell c of the block and the dither u in [−½, ½) of each value, drawn from a seed that both
know,

    q = round(r/c + u)          travels modulo 2^bits
    ẑ = (q − u)·c rotated back  is what is read of it

The receiver takes for q the number of that remainder which is nearest to its own r/c + u. That is q itself wherever
the two differ by less than (2^(bits−1) − ½)·c. Whether it is for all 256 values, a checksum of 24 bits over the turns
q >> bits tells, but for one time in 16 million. A block that is not is *unread*, and nothing of it is used.

Since the sender knows ẑ without knowing what the receiver holds, a mean by `node.rounds.contribution` stays exact.
The error of ẑ is uniform in the cell, whatever z is: its root mean square is c/√12, its mean over the dither zero.
Bytes per value: bits/8 + 1/64; each block has a byte for its cell and three for its checksum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from protocol.codecs import lattice_kernels
from protocol.codecs.eden import SIGNS, rotation
from protocol.codecs.kernels import BLOCK, Floats
from protocol.codecs.lattice_kernels import SPREAD, Tables
from protocol.codecs.near_codecs import CELL_STEPS, SPANNED
from protocol.errors import CodecError

CELL_BIAS = 160  # the byte of a cell of one: cells from 2^-40 to 2^23.75
DITHERS = 2**16  # numbers in the table of dithers
MOST_POINTS = 2.0**21  # |r/c| at most: beyond, float32 does not tell neighbouring points apart
_FAR = 2.0**30  # what lies further off is unread anyway, and must stay within an int32


@dataclass(frozen=True)
class LatticePoints:
    """A tensor [n] as it travels, on its device, for blocks = ⌈n/256⌉."""

    bits: int
    count: int  # n
    cells: Tensor  # uint8 [blocks]: a cell is 2^((byte − 160)/4)
    checksums: Tensor  # int32 [blocks], of 24 bits
    remainders: Tensor  # uint8 [blocks · 32 · bits]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.bits, self.count)

    def on(self, device: torch.device) -> LatticePoints:
        """The same points on a device."""
        moved = (part.to(device) for part in (self.cells, self.checksums, self.remainders))
        return LatticePoints(self.bits, self.count, *moved)


def nbytes_of(bits: int, values: int) -> int:
    """Cells, checksums and remainders of ⌈values/256⌉ blocks."""
    return -(-values // BLOCK) * (4 + BLOCK * bits // 8)


def cell_for(distance: Tensor, bits: int) -> Tensor:
    """The cell for blocks that are this far apart (root mean square of a value's difference), [blocks]."""
    return distance * (SPANNED[bits] / float(1 << bits - 1))


def to_lattice(flat: Tensor, cells: Tensor, seeds: Sequence[int], bits: int, each: int = 0) -> LatticePoints:
    """The points of a float32 tensor [n], each block with at least its cell of `cells` [blocks].

    `each` blocks follow one of the seeds, or all the only one. A cell is rounded up to one that has a byte, and is
    larger where the block's values are 2^21 times as large. Raises `CodecError` for NaN, infinity, a cell that is no
    number, and values beyond 2^40.
    """
    if _is_for_loops(flat, seeds):
        return _to_lattice_here(flat, cells, seeds[0], bits)
    return to_lattice_there(flat, cells, numbers_of(seeds, len(cells), flat.device, each), bits)


def _is_for_loops(flat: Tensor, seeds: Sequence[int]) -> bool:
    """Return whether the compiled loops can do it: one piece, on the host."""
    return flat.device.type == "cpu" and len(seeds) == 1


def numbers_of(seeds: Sequence[int], blocks: int, device: torch.device, each: int = 0) -> Tensor:
    """Numbers to draw blocks' dithers by, int64 [blocks]: `each` blocks follow one seed, or all the only one."""
    places = torch.arange(blocks, device=device)
    each = each or max(1, blocks)
    numbers = torch.tensor([seed & 0xFFFFFFFF for seed in seeds], device=device)
    return places % each ^ numbers[places // each]


def to_lattice_there(flat: Tensor, cells: Tensor, numbers: Tensor, bits: int) -> LatticePoints:
    """`to_lattice` in torch's operations, for another device; points differ where one is half way to the next."""
    rotated = _rotated(flat)
    least = rotated.abs().amax(dim=1) / MOST_POINTS
    wanted = torch.maximum(cells.to(torch.float32), least).clamp_min(2.0 ** (-CELL_BIAS / CELL_STEPS))
    codes = torch.ceil(torch.log2(wanted) * CELL_STEPS) + CELL_BIAS
    if not bool(((codes <= 255) & (cells >= 0)).all()):  # false also for NaN
        raise _refusal(bits)
    cell_bytes = codes.to(torch.uint8)
    points = _nearest(rotated, cell_bytes, numbers)
    return LatticePoints(
        bits, flat.numel(), cell_bytes, _checksum(points >> bits), _packed(points & (2**bits - 1), bits)
    )


def as_sent(flat: Tensor, sent: LatticePoints, seeds: Sequence[int], each: int = 0) -> Tensor:
    """ẑ [n] of the tensor that `sent` was made of, as every receiver that can read a block reads it.

    `seeds` and `each` as of `to_lattice`.
    """
    if _is_for_loops(flat, seeds):
        rows = _in_blocks(flat.float())
        read = torch.empty_like(rows)
        lattice_kernels.read_sent(_array(rows), sent.cells.numpy(), tables(), seeds[0], _array(read))
        return read.view(-1)[: sent.count]
    return as_sent_there(flat, sent, numbers_of(seeds, len(sent.cells), flat.device, each))


def as_sent_there(flat: Tensor, sent: LatticePoints, numbers: Tensor) -> Tensor:
    """`as_sent` in torch's operations."""
    points = _nearest(_rotated(flat), sent.cells, numbers)
    return _rotated_back(points, sent.cells, numbers)[: sent.count]


def read_beside(
    own: Tensor, received: LatticePoints, seeds: Sequence[int], each: int = 0
) -> tuple[Tensor, Tensor]:
    """(ẑ [n], whether each block is read, bool [blocks]) by a receiver that holds `own` [n].

    `seeds` and `each` as of `to_lattice`. What is unread has the receiver's own values. Never raises for what a peer
    sent, if the sizes fit.
    """
    if _is_for_loops(own, seeds):
        return _read_beside_here(own, received, seeds[0])
    return read_beside_there(own, received, numbers_of(seeds, len(received.cells), own.device, each))


def read_beside_there(own: Tensor, received: LatticePoints, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`read_beside` in torch's operations."""
    turn = 2**received.bits
    cells = _cells(received.cells)
    remainders = _unpacked(received.remainders, received.bits)
    own_place = (_rotated(own) / cells[:, None] + _dither(numbers)).clamp(-_FAR, _FAR)
    points = remainders + turn * torch.round((own_place - remainders) / turn).to(torch.int32)
    is_read = _checksum(points >> received.bits) == received.checksums
    read = _rotated_back(points, received.cells, numbers)
    either = torch.where(is_read[:, None], read.view(-1, BLOCK), _in_blocks(own))
    return either.view(-1)[: received.count], is_read


def _to_lattice_here(flat: Tensor, cells: Tensor, seed: int, bits: int) -> LatticePoints:
    """`to_lattice` in compiled loops."""
    rows = _in_blocks(flat.float())
    blocks = len(rows)
    cell_bytes, checksums = torch.empty(blocks, dtype=torch.uint8), torch.empty(blocks, dtype=torch.int32)
    remainders = torch.empty(blocks * BLOCK * bits // 8, dtype=torch.uint8)
    is_sendable = lattice_kernels.to_points(
        _array(rows), _array(cells.float()), cell_bytes.numpy(), checksums.numpy(), remainders.numpy(),
        tables(), seed, bits, MOST_POINTS, CELL_STEPS, CELL_BIAS,
    )  # fmt: skip
    if not is_sendable:
        raise _refusal(bits)
    return LatticePoints(bits, flat.numel(), cell_bytes, checksums, remainders)


def _read_beside_here(own: Tensor, received: LatticePoints, seed: int) -> tuple[Tensor, Tensor]:
    rows = _in_blocks(own.float())
    read, is_read = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.bool)
    lattice_kernels.read_near(
        _array(rows), received.cells.numpy(), received.checksums.numpy(), received.remainders.numpy(),
        tables(), seed, received.bits, _array(read), is_read.numpy(),
    )  # fmt: skip
    return read.view(-1)[: received.count], is_read


def load() -> None:
    """Compile the loops now, or read them from disk."""
    lattice_kernels.load(tables())


def _array(values: Tensor) -> Floats:
    array: Floats = values.contiguous().view(-1).numpy()
    return array


def _refusal(bits: int) -> CodecError:
    return CodecError(f"NaN or infinite values, and those beyond 2^40, cannot be sent as mod{bits}")


def cells_of(points: LatticePoints) -> Tensor:
    """The cells, float32 [blocks]."""
    return _cells(points.cells)


def distance_of(one: Tensor, other: Tensor) -> Tensor:
    """Root mean square of the difference by block, [blocks]; a last block that is shorter counts its own values."""
    rows = _in_blocks(one - other)
    counts = torch.full((len(rows),), float(BLOCK), device=one.device)
    counts[-1] = one.numel() - BLOCK * (len(rows) - 1)
    return (rows.square().sum(dim=1) / counts).sqrt()


def _in_blocks(flat: Tensor) -> Tensor:
    """[blocks, 256] of a tensor [n], the last block filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _rotated(flat: Tensor) -> Tensor:
    """The rotated blocks, float32 [blocks, 256]."""
    return _in_blocks(flat.to(torch.float32)) @ _on(flat.device, rotation)


def _rotated_back(points: Tensor, cell_bytes: Tensor, numbers: Tensor) -> Tensor:
    """The points' values, rotated back, [blocks · 256]."""
    rows = (points.to(torch.float32) - _dither(numbers)) * _cells(cell_bytes)[:, None]
    return (rows @ _on(points.device, rotation).T).view(-1)


def _nearest(rotated: Tensor, cell_bytes: Tensor, numbers: Tensor) -> Tensor:
    """The nearest points q, int32 [blocks, 256]."""
    return torch.round(rotated / _cells(cell_bytes)[:, None] + _dither(numbers)).to(torch.int32)


def _cells(cell_bytes: Tensor) -> Tensor:
    return _on(cell_bytes.device, _cell_table)[cell_bytes.long()]


@cache
def _on(device: torch.device, table: Callable[[], Tensor]) -> Tensor:
    """A table that was copied to the device once: a copy waits for what the device has to do."""
    return table().to(device)


@cache
def _cell_table() -> Tensor:
    """The cell for each byte, from numbers that no library computes: both ends have the same cell to the last bit."""
    quarters = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
    exponents = [divmod(byte - CELL_BIAS, CELL_STEPS) for byte in range(256)]
    return torch.tensor([math.ldexp(quarters[rest], power) for power, rest in exponents], dtype=torch.float32)


def _dither(numbers: Tensor) -> Tensor:
    """[blocks, 256] in [−½, ½): of each block some neighbours in the table, the same on every machine."""
    first = _mixed(numbers) % (DITHERS - BLOCK)
    return _on(numbers.device, _dither_table)[first[:, None] + torch.arange(BLOCK, device=numbers.device)]


@cache
def _dither_table() -> Tensor:
    """[DITHERS] in [−½, ½)."""
    return (_mixed(torch.arange(DITHERS)) >> 8).to(torch.float32) * 2.0**-24 - 0.5


@cache
def _factor_table() -> Tensor:
    """int64 [256], odd, of 32 bits: with one for each place a block that is off as a whole is told, too."""
    return _mixed(torch.arange(DITHERS, DITHERS + BLOCK)) | 1


def _checksum(turns: Tensor) -> Tensor:
    """int32 [blocks] of turns int32 [blocks, 256]. Low bits get some of the high ones: turns may be powers of two."""
    spread = (turns.long() * SPREAD) & 0xFFFFFFFF
    spread ^= spread >> 15
    return ((spread * _on(turns.device, _factor_table)).sum(dim=1) >> 8 & 0xFFFFFF).to(torch.int32)


@cache
def tables() -> Tables:
    """The tables for the compiled loops."""
    factors = _factor_table().numpy().astype(np.uint32)
    return Tables(SIGNS, _cell_table().numpy(), _dither_table().numpy(), factors)


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of 32 bits of numbers of 32 bits, int64 (C. Wellons' lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


def _packed(remainders: Tensor, bits: int) -> Tensor:
    """A plane of 32 bytes for each bit of a block: byte j has it of values j, j + 32, …, the first lowest."""
    shifts = torch.arange(8, device=remainders.device, dtype=torch.int32).view(1, 1, 8, 1)
    planes = torch.arange(bits, device=remainders.device, dtype=torch.int32).view(1, bits, 1, 1)
    values = remainders.view(len(remainders), 1, 8, BLOCK // 8) >> planes & 1
    return (values << shifts).sum(dim=2).to(torch.uint8).view(-1)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The unpacked values, int32 [blocks, 256]."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.int32).view(1, 1, 8, 1)
    planes = torch.arange(bits, device=packed.device, dtype=torch.int32).view(1, bits, 1, 1)
    values = packed.view(-1, bits, 1, BLOCK // 8).to(torch.int32) >> shifts & 1
    return (values << planes).sum(dim=1).to(torch.int32).view(-1, BLOCK)
