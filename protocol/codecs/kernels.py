"""Compiled loops over float32 in memory: in one pass what torch does in a pass for each operation.

Compiled by numba at their first use, some seconds, and kept on disk after that. They run without the interpreter's
lock. Every array is one-dimensional and contiguous; nothing is checked: the callers are `protocol.codecs.codec` and
`protocol.codecs.eden`.
The inner loops have a constant length and index by their counter alone, for only then they are vectorised: six to
nine times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]
Bytes = NDArray[np.int8]
Codes = NDArray[np.uint8]
Kernel = TypeVar("Kernel", bound=Callable[..., object])

BLOCK = 256  # values that share a scale
_HALF = BLOCK // 2
_DOUBLINGS = 8  # 2⁸ = BLOCK
_LANES = 64  # bytes: as many as the codes of a block of the fewest bits
_INFINITE = np.int32(0x7F800000)  # the bits of infinity; above them lies NaN
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign
_EXPONENT = np.int32(0x7F800000)  # alone, the bits of a power of two


def compiled(kernel: Kernel, **more: object) -> Kernel:
    """`kernel` in machine code, made at its first call and kept on disk where that can be written to."""
    settings = {"nogil": True, "error_model": "numpy", **more}
    try:
        return numba.njit(cache=True, **settings)(kernel)  # type: ignore[no-any-return]
    except RuntimeError:  # there is no directory to keep it in that can be written to
        return numba.njit(**settings)(kernel)  # type: ignore[no-any-return]


# sums in any order: one that is in the order of the values is not vectorised
_compiled_with_sums = partial(compiled, fastmath={"reassoc"})


def load() -> None:
    """Compile every kernel of this file now, or read it from disk, rather than in the middle of a round."""
    for size in (BLOCK, BLOCK + 1):
        one, two = np.zeros(size, np.float32), np.zeros(size, np.float32)
        scales, quantised = np.zeros(-(-size // BLOCK), np.float32), np.zeros(size, np.int8)
        quantise(one, scales, quantised, 0.0, 1.0)
        add_quantised(one, quantised, scales, 1.0)
        codes, table = np.zeros(scales.size * _HALF, np.uint8), np.zeros(16, np.float32)
        rotate_and_quantise(one, scales, codes, two, table[:8], table[:7], 4, 0.0, 1.0)
        add_rotated(one, scales, codes, two, table, 4, 1.0)


def quantise(values: Floats, scales: Floats, quantised: Bytes, smallest: float, largest: float) -> bool:
    """Fill `quantised`, and `scales`, one for each block; False when a value is NaN or infinite.

    A scale is absmax/127, at most `largest`; where it is below `smallest` it is 0, and so is the block.
    """
    bounds = np.float32(smallest), np.float32(largest)
    whole = values.size - values.size % BLOCK
    blocks = whole // BLOCK
    is_finite = _quantise_blocks(
        values[:whole].view(np.int32), values[:whole], scales[:blocks].view(np.int32), scales[:blocks],
        quantised[:whole], *bounds,
    )  # fmt: skip
    if whole == values.size:
        return bool(is_finite)
    rest, room = np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.int8)
    rest[: values.size - whole] = values[whole:]
    is_finite &= _quantise_blocks(
        rest.view(np.int32), rest, scales[blocks:].view(np.int32), scales[blocks:], room, *bounds
    )
    quantised[whole:] = room[: values.size - whole]
    return bool(is_finite)


def add_quantised(target: Floats, quantised: Bytes, scales: Floats, factor: float) -> None:
    """target ← target + factor·x, x being what `quantised` and `scales` stand for."""
    whole = target.size - target.size % BLOCK
    blocks = whole // BLOCK
    _add_blocks(target[:whole], quantised[:whole], scales[:blocks], np.float32(factor))
    if whole < target.size:
        scale = scales[blocks] * np.float32(factor)
        target[whole:] += quantised[whole:].astype(np.float32) * scale


def rotate_and_quantise(
    values: Floats, scales: Floats, codes: Codes, signs: Floats, magnitudes: Floats, bounds: Floats,
    bits: int, smallest: float, largest: float,
) -> bool:  # fmt: skip
    """Fill `codes`, of `bits` each, and `scales`, as `codecs.eden` says; False when a value is too large or NaN.

    A block whose values are all below `smallest` gets the scale 0.
    """
    grid = signs, magnitudes, bounds, np.uint8(bits)
    limits = np.float32(smallest), np.float32(largest)
    blocks = values.size // BLOCK
    whole, block_bytes = blocks * BLOCK, BLOCK * bits // 8
    is_sendable = _rotate_and_quantise_blocks(
        values[:whole].view(np.int32), values[:whole], scales[:blocks].view(np.int32), scales[:blocks],
        codes[: blocks * block_bytes], *grid, *limits,
    )  # fmt: skip
    if whole < values.size:
        rest = np.zeros(BLOCK, np.float32)
        rest[: values.size - whole] = values[whole:]
        is_sendable &= _rotate_and_quantise_blocks(
            rest.view(np.int32), rest, scales[blocks:].view(np.int32), scales[blocks:],
            codes[blocks * block_bytes :], *grid, *limits,
        )  # fmt: skip
    return bool(is_sendable)


def add_rotated(
    target: Floats, scales: Floats, codes: Codes, signs: Floats, centroids: Floats, bits: int, factor: float
) -> None:
    """target ← target + factor·x, x being what `scales` and `codes` stand for."""
    grid = signs, centroids, np.uint8(bits), np.float32(factor)
    blocks = target.size // BLOCK
    whole, block_bytes = blocks * BLOCK, BLOCK * bits // 8
    _add_rotated_blocks(target[:whole], scales[:blocks], codes[: blocks * block_bytes], *grid)
    if whole < target.size:
        rest = np.zeros(BLOCK, np.float32)
        _add_rotated_blocks(rest, scales[blocks:], codes[blocks * block_bytes :], *grid)
        target[whole:] += rest[: target.size - whole]


@compiled
def _quantise_blocks(
    bits: Integers, values: Floats, scale_bits: Integers, scales: Floats, quantised: Bytes,
    smallest: np.float32, largest: np.float32,
) -> bool:  # fmt: skip
    """Do `quantise` for whole blocks. `bits` and `scale_bits` are the same memory as `values` and `scales`."""
    highest = np.int32(0)
    for block in range(scales.size):
        row_bits = bits[block * BLOCK : (block + 1) * BLOCK]
        row = values[block * BLOCK : (block + 1) * BLOCK]
        result = quantised[block * BLOCK : (block + 1) * BLOCK]
        absmax = np.int32(0)
        for i in range(BLOCK):  # magnitudes are ordered as their bits are, NaN above all numbers
            absmax = max(absmax, row_bits[i] & _MAGNITUDE)
        highest = max(highest, absmax)
        scale_bits[block] = absmax
        scale = min(scales[block] / np.float32(127), largest)
        is_too_small = scale < smallest
        scales[block] = np.float32(0) if is_too_small else scale
        divisor = np.float32(np.inf) if is_too_small else scale
        for i in range(BLOCK):
            result[i] = np.int8(np.rint(row[i] / divisor))
    return bool(highest < _INFINITE)


@compiled
def _add_blocks(target: Floats, quantised: Bytes, scales: Floats, factor: np.float32) -> None:
    for block in range(scales.size):
        scale = scales[block] * factor
        row = target[block * BLOCK : (block + 1) * BLOCK]
        added = quantised[block * BLOCK : (block + 1) * BLOCK]
        for i in range(BLOCK):
            row[i] += scale * np.float32(added[i])


@compiled
def rotate(values: Floats, room: Floats) -> None:
    """values ← H·values, H being the Walsh-Hadamard matrix of ±1 of a block; `room` is of the same size.

    M. Pease, 1968: every stage reads two halves and writes pairs, so that all eight are the same, vectorised loop.
    In the usual butterflies in place the last stages' loops are shorter than a vector: five times slower.
    """
    for _ in range(_DOUBLINGS // 2):
        for i in range(_HALF):
            first, second = values[i], values[i + _HALF]
            room[2 * i] = first + second
            room[2 * i + 1] = first - second
        for i in range(_HALF):
            first, second = room[i], room[i + _HALF]
            values[2 * i] = first + second
            values[2 * i + 1] = first - second


@_compiled_with_sums
def _rotate_and_quantise_blocks(
    bits: Integers, values: Floats, scale_bits: Integers, scales: Floats, codes: Codes, signs: Floats,
    magnitudes: Floats, bounds: Floats, code_bits: np.uint8, smallest: np.float32, largest: np.float32,
) -> bool:  # fmt: skip
    """Do `rotate_and_quantise` for whole blocks. `bits` and `scale_bits` are the memory of `values` and `scales`.

    A block is first divided by a power of two, which is exact, so that squares stay in the range of float32.
    """
    x, room, level = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
    block_bytes = BLOCK * np.int64(code_bits) // 8
    is_negative = np.uint8(1) << (code_bits - np.uint8(1))
    all_sendable = True
    for block in range(scales.size):
        row_bits = bits[block * BLOCK : (block + 1) * BLOCK]
        row = values[block * BLOCK : (block + 1) * BLOCK]
        result = codes[block * block_bytes : (block + 1) * block_bytes]
        absmax = np.int32(0)
        for i in range(BLOCK):
            absmax = max(absmax, row_bits[i] & _MAGNITUDE)
        scale_bits[block] = absmax
        all_sendable &= scales[block] <= largest  # false also for NaN
        is_too_small = scales[block] < smallest
        scale_bits[block] = absmax & _EXPONENT
        power = scales[block]
        factor = np.float32(0) if is_too_small else np.float32(1 / 16) / power
        for i in range(BLOCK):
            x[i] = row[i] * (signs[i] * factor)
        rotate(x, room)

        squares = np.float32(0)
        for i in range(BLOCK):
            squares += x[i] * x[i]
        rms = np.sqrt(squares / np.float32(BLOCK))
        centroid = room
        for i in range(BLOCK):
            level[i] = is_negative if x[i] < np.float32(0) else np.uint8(0)
            centroid[i] = magnitudes[0]
        # few passes over what is in the first cache, instead of a search for each value
        for j in range(bounds.size):
            bound, step = bounds[j] * rms, magnitudes[j + 1] - magnitudes[j]
            for i in range(BLOCK):
                is_above = abs(x[i]) > bound
                level[i] += np.uint8(1) if is_above else np.uint8(0)
                centroid[i] += step if is_above else np.float32(0)
        product = np.float32(0)
        for i in range(BLOCK):
            product += abs(x[i]) * centroid[i]
        scales[block] = squares / product * power if squares > np.float32(0) else np.float32(0)

        for first in range(0, block_bytes, _LANES):
            packed, codes_of_part = result[first : first + _LANES], level[first : first + _LANES]
            for i in range(_LANES):
                packed[i] = codes_of_part[i]
            for part in range(1, 8 // np.int64(code_bits)):
                start, shift = part * block_bytes + first, np.uint8(part * code_bits)
                codes_of_part = level[start : start + _LANES]
                for i in range(_LANES):
                    packed[i] |= codes_of_part[i] << shift
    return all_sendable


@compiled
def _add_rotated_blocks(
    target: Floats, scales: Floats, codes: Codes, signs: Floats, centroids: Floats, code_bits: np.uint8,
    factor: np.float32,
) -> None:  # fmt: skip
    x, room = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    block_bytes = BLOCK * np.int64(code_bits) // 8
    mask = (np.uint8(1) << code_bits) - np.uint8(1)
    for block in range(scales.size):
        row = target[block * BLOCK : (block + 1) * BLOCK]
        coded = codes[block * block_bytes : (block + 1) * block_bytes]
        scale = scales[block] * factor * np.float32(1 / 16)
        for part in range(8 // np.int64(code_bits)):
            shift = np.uint8(part * code_bits)
            for first in range(0, block_bytes, _LANES):
                start = part * block_bytes + first
                packed, read = coded[first : first + _LANES], x[start : start + _LANES]
                for i in range(_LANES):
                    read[i] = centroids[(packed[i] >> shift) & mask] * scale
        rotate(x, room)
        for i in range(BLOCK):
            row[i] += x[i] * signs[i]
