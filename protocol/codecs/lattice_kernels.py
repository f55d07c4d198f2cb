"""The loops of the lattice over float32 in memory: what `codecs.lattice` says in torch, in a pass for each block.

As in `codecs.kernels` every array is one-dimensional and contiguous, nothing is checked, and the inner loops have a
constant length: they are vectorised. Here values come in whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.codecs.kernels import BLOCK, Codes, Floats, Integers, compiled, rotate

Flags = NDArray[np.bool_]
Numbers = NDArray[np.uint32]

_LANES = BLOCK // 8  # bytes of a plane of bits
_SIXTEENTH = np.float32(1 / 16)  # makes the rotation orthonormal
_FAR = np.float32(2.0**30)
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign
_ALL = 0xFFFFFFFF
SPREAD = 0x7FEB352D
_SPREAD = np.uint32(SPREAD)


class Tables(NamedTuple):
    """The tables that both ends know, [256] but the dithers."""

    signs: Floats  # before the rotation
    cells: Floats  # by byte
    dithers: Floats  # in [−½, ½)
    factors: Numbers  # of a turn in the checksum, by place


def load(tables: Tables) -> None:
    """Compile all now, or read them from disk, rather than in the middle of a round."""
    values, cells, checksums = np.zeros(BLOCK, np.float32), np.zeros(1, np.uint8), np.zeros(1, np.int32)
    remainders = np.zeros(_LANES * 2, np.uint8)
    to_points(values, np.ones(1, np.float32), cells, checksums, remainders, tables, 7, 2, 1.0, 4, 160)
    read_sent(values, cells, tables, 7, values.copy())
    read_near(values, cells, checksums, remainders, tables, 7, 2, values.copy(), np.zeros(1, np.bool_))


def to_points(
    values: Floats, wanted: Floats, cells: Codes, checksums: Integers, remainders: Codes, tables: Tables,
    seed: int, bits: int, most_points: float, steps: int, bias: int,
) -> bool:  # fmt: skip
    """Fill `cells`, `checksums` and `remainders`; False when a value is NaN or has no cell that is large enough."""
    limits = np.float32(most_points), np.float64(steps), np.float64(bias)
    number = np.uint32(seed & _ALL)
    return bool(
        _to_points(values, wanted, cells, checksums, remainders, tables, number, np.int32(bits), *limits)
    )


def read_sent(values: Floats, cells: Codes, tables: Tables, seed: int, read: Floats) -> None:
    """Fill `read` with what others read of `values` sent in these cells."""
    _read_sent(values, cells, tables, np.uint32(seed & _ALL), read)


def read_near(
    own: Floats, cells: Codes, checksums: Integers, remainders: Codes, tables: Tables, seed: int, bits: int,
    read: Floats, is_read: Flags,
) -> None:  # fmt: skip
    """Fill `read` with what is read beside `own`, or with that where `is_read` becomes false."""
    number = np.uint32(seed & _ALL)
    _read_near(own, cells, checksums, remainders, tables, number, np.int32(bits), read, is_read)


@compiled
def _first_dither(block: int, seed: np.uint32, tables: Tables) -> np.int64:
    """The place where the dithers of a block begin."""
    number = np.uint32(block) ^ seed
    number = np.uint32((number ^ (number >> np.uint32(16))) * np.uint32(0x7FEB352D))
    number = np.uint32((number ^ (number >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.int64(np.uint32(number ^ (number >> np.uint32(16)))) % (tables.dithers.size - BLOCK)


@compiled
def _place(row: Floats, signs: Floats, x: Floats, room: Floats) -> None:
    """x ← the row, rotated."""
    for i in range(BLOCK):
        x[i] = row[i] * (signs[i] * _SIXTEENTH)
    rotate(x, room)


@compiled
def _back(points: Integers, dither: Floats, cell: np.float32, signs: Floats, x: Floats, room: Floats) -> None:
    """x ← the block of these points."""
    for i in range(BLOCK):
        x[i] = (np.float32(points[i]) - dither[i]) * cell
    rotate(x, room)
    for i in range(BLOCK):
        x[i] *= signs[i] * _SIXTEENTH


@compiled
def _checksum(points: Integers, bits: np.int32, factors: Numbers) -> np.int32:
    total = np.uint32(0)
    for i in range(BLOCK):
        turn = np.uint32(np.uint32(points[i] >> bits) * _SPREAD)
        turn ^= turn >> np.uint32(15)
        total = np.uint32(total + np.uint32(turn * factors[i]))
    return np.int32(total >> np.uint32(8))


@compiled
def _to_points(
    values: Floats, wanted: Floats, cells: Codes, checksums: Integers, remainders: Codes, tables: Tables,
    seed: np.uint32, bits: np.int32, most_points: np.float32, steps: np.float64, bias: np.float64,
) -> bool:  # fmt: skip
    x, room = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    points, rest, mask = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint8), np.int32((1 << bits) - 1)
    block_bytes, x_bits, room_bits = _LANES * np.int64(bits), x.view(np.int32), room.view(np.int32)
    for block in range(cells.size):
        _place(values[block * BLOCK : (block + 1) * BLOCK], tables.signs, x, room)
        highest = np.int32(0)
        for i in range(BLOCK):  # magnitudes are ordered as their bits are
            highest = max(highest, x_bits[i] & _MAGNITUDE)
        room_bits[0] = highest
        least = max(wanted[block], room[0] / most_points)
        code = np.ceil(np.log2(np.float64(least)) * steps) + bias if least > 0 else 0.0
        if not (x[0] == x[0] and wanted[block] >= 0 and code <= 255.0):  # NaN is in all values or in none
            return False
        cells[block] = np.uint8(max(code, 0.0))
        cell, first = tables.cells[cells[block]], _first_dither(block, seed, tables)
        dither = tables.dithers[first : first + BLOCK]
        for i in range(BLOCK):
            points[i] = np.int32(np.rint(x[i] / cell + dither[i]))
        checksums[block] = _checksum(points, bits, tables.factors)
        for i in range(BLOCK):
            rest[i] = np.uint8(points[i] & mask)
        packed = remainders[block * block_bytes : (block + 1) * block_bytes]
        for plane in range(bits):
            down, lanes = np.uint8(plane), packed[plane * _LANES : (plane + 1) * _LANES]
            for j in range(_LANES):
                lanes[j] = (rest[j] >> down) & np.uint8(1)
            for part in range(1, 8):
                up, of_part = np.uint8(part), rest[part * _LANES : (part + 1) * _LANES]
                for j in range(_LANES):
                    lanes[j] |= ((of_part[j] >> down) & np.uint8(1)) << up
    return True


@compiled
def _read_sent(values: Floats, cells: Codes, tables: Tables, seed: np.uint32, read: Floats) -> None:
    x, room = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    points = np.empty(BLOCK, np.int32)
    for block in range(cells.size):
        cell, first = tables.cells[cells[block]], _first_dither(block, seed, tables)
        dither = tables.dithers[first : first + BLOCK]
        _place(values[block * BLOCK : (block + 1) * BLOCK], tables.signs, x, room)
        for i in range(BLOCK):
            points[i] = np.int32(np.rint(x[i] / cell + dither[i]))
        _back(points, dither, cell, tables.signs, x, room)
        row = read[block * BLOCK : (block + 1) * BLOCK]
        for i in range(BLOCK):
            row[i] = x[i]


@compiled
def _read_near(
    own: Floats, cells: Codes, checksums: Integers, remainders: Codes, tables: Tables, seed: np.uint32,
    bits: np.int32, read: Floats, is_read: Flags,
) -> None:  # fmt: skip
    x, room = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    points, rest = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint8)
    block_bytes, turn = _LANES * np.int64(bits), np.float32(1 << bits)
    for block in range(cells.size):
        cell, first = tables.cells[cells[block]], _first_dither(block, seed, tables)
        dither = tables.dithers[first : first + BLOCK]
        row = own[block * BLOCK : (block + 1) * BLOCK]
        _place(row, tables.signs, x, room)
        packed = remainders[block * block_bytes : (block + 1) * block_bytes]
        for part in range(8):
            down, of_part = np.uint8(part), rest[part * _LANES : (part + 1) * _LANES]
            for j in range(_LANES):
                of_part[j] = (packed[j] >> down) & np.uint8(1)
            for plane in range(1, bits):
                up, lanes = np.uint8(plane), packed[plane * _LANES : (plane + 1) * _LANES]
                for j in range(_LANES):
                    of_part[j] |= ((lanes[j] >> down) & np.uint8(1)) << up
        for i in range(BLOCK):
            place = min(max(x[i] / cell + dither[i], -_FAR), _FAR)
            turns = np.int32(np.rint((place - np.float32(rest[i])) / turn))
            points[i] = np.int32(rest[i]) + (turns << bits)
        is_read[block] = _checksum(points, bits, tables.factors) == checksums[block]
        target = read[block * BLOCK : (block + 1) * BLOCK]
        if is_read[block]:
            _back(points, dither, cell, tables.signs, x, room)
            for i in range(BLOCK):
                target[i] = x[i]
        else:
            for i in range(BLOCK):
                target[i] = row[i]
