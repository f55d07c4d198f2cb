"""Compiled loops over float32 in memory: in one pass what torch does in a pass for each operation.

Compiled by numba at their first use, a second or so, and kept on disk after that. They run without the interpreter's
lock. Every array is one-dimensional and contiguous; nothing is checked: the callers are `protocol.codec` and `node`.
The inner loops have a constant length, for only then they are vectorised: six to nine times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]
Bytes = NDArray[np.int8]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

BLOCK = 256  # values that share a scale
_INFINITE = np.int32(0x7F800000)  # the bits of infinity; above them lies NaN
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign


def _compiled(kernel: Kernel) -> Kernel:
    settings = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **settings)(kernel)  # type: ignore[no-any-return]
    except RuntimeError:  # there is no directory to keep it in that can be written to
        return numba.njit(**settings)(kernel)  # type: ignore[no-any-return]


def load() -> None:
    """Compile every kernel for float32 now, or read it from disk, rather than in the middle of a round."""
    for size in (BLOCK, BLOCK + 1):
        one, two, three = (np.zeros(size, np.float32) for _ in range(3))
        number = np.float32(1)
        scales, quantised = np.zeros(-(-size // BLOCK), np.float32), np.zeros(size, np.int8)
        quantise(one, scales, quantised, 0.0, 1.0)
        add_quantised(one, quantised, scales, 1.0)
        add_weighted(one, two, number, three, number)
        outer_step(one, two, three, number, number)


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


@_compiled
def _quantise_blocks(
    bits: Integers, values: Floats, scale_bits: Integers, scales: Floats, quantised: Bytes,
    smallest: np.float32, largest: np.float32,
) -> bool:  # fmt: skip
    """As `quantise`, of whole blocks. `bits` and `scale_bits` are the same memory as `values` and `scales`."""
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


@_compiled
def _add_blocks(target: Floats, quantised: Bytes, scales: Floats, factor: np.float32) -> None:
    for block in range(scales.size):
        scale = scales[block] * factor
        row = target[block * BLOCK : (block + 1) * BLOCK]
        added = quantised[block * BLOCK : (block + 1) * BLOCK]
        for i in range(BLOCK):
            row[i] += scale * np.float32(added[i])


@_compiled
def add_weighted(target: Floats, first: Floats, a: np.float32, second: Floats, b: np.float32) -> None:
    """target ← target + a·first + b·second."""
    for i in range(target.size):
        target[i] += a * first[i] + b * second[i]


@_compiled
def outer_step(phi: Floats, delta: Floats, mean_z: Floats, alpha: np.float32, gamma: np.float32) -> None:
    """δ ← αδ + mean − γφ, φ ← φ + δ, of either precision."""
    for i in range(phi.size):
        slow = phi[i]
        momentum = mean_z[i] + alpha * delta[i] - gamma * slow
        delta[i] = momentum
        phi[i] = slow + momentum
