"""EDEN: a few bits per value after a rotation that makes any block look Gaussian.

S. Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
arXiv 2108.08842; the one-bit predecessor is DRIVE, arXiv 2105.08339. A block x of 256 values is multiplied by fixed
random signs and by the orthonormal Walsh-Hadamard matrix, which spreads outliers over the whole block: what comes
out, by its root mean square, is close to standard normal whatever x was. It is rounded to the centroids c that are
best for the standard normal (Lloyd-Max). The receiver reads S·c rotated back, S = ‖x‖²/⟨rotated x, c⟩ being EDEN's
scale: with it ⟨read, x⟩ = ‖x‖², so what was sent is not shrunk, and the squared error is ‖x‖²·D/(1 − D), D being
that of the centroids.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.kernels import BLOCK, Floats, add_rotated, rotate_and_quantise
from protocol.errors import CodecError

SMALLEST = 2.0**-118  # a block of smaller magnitudes is sent as zeros
LARGEST = 2.0**118  # larger values are refused; so nothing that is sent is read as infinity
# ‖rotated back‖∞ ≤ ‖c‖₁/16 ≤ 16·2.733 for a scale of one
MOST_PER_SCALE = 44.0

# One bit of a hash for each sign: the same on every machine and in every version of any library.
_RANDOM = np.frombuffer(hashlib.sha256(b"noloco eden signs").digest(), np.uint8)
SIGNS: Floats = np.where(np.unpackbits(_RANDOM), np.float32(-1), np.float32(1))


@dataclass(frozen=True)
class Grid:
    """The Lloyd-Max quantiser of the standard normal: its centroids' magnitudes, and the bounds between them.

    A code is the number of a magnitude, its highest bit set where the value is negative.
    """

    bits: int
    magnitudes: Floats

    @property
    def bounds(self) -> Floats:
        return (self.magnitudes[1:] + self.magnitudes[:-1]) / np.float32(2)

    @property
    def centroids(self) -> Floats:
        """The centroids, by code."""
        return np.concatenate([self.magnitudes, -self.magnitudes])

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.bits // 8

    def nbytes_of(self, values: int) -> int:
        """A scale and the codes of each block; the last block is filled up with zeros."""
        return -(-values // BLOCK) * (4 + self.block_bytes)


# J. Max, "Quantizing for Minimum Distortion", 1960, table I; more digits by the same iteration
GRIDS = {
    "eden4": Grid(
        4,
        np.array(
            [0.12839503, 0.3880483, 0.65675912, 0.94234046, 1.2562312, 1.6180464, 2.0690172, 2.7325896],
            np.float32,
        ),
    ),
    "eden2": Grid(2, np.array([0.45278004, 1.5104176], np.float32)),
}


def rotated(flat: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """(scales float32 [blocks], codes uint8 [blocks · block_bytes]) of a one-dimensional tensor, on its device.

    A byte has the codes of values i, i + block_bytes, … of its block, the first in its lowest bits.
    Raises `CodecError` for integers, NaN, infinity and values beyond `LARGEST`.
    """
    if not flat.is_floating_point():
        raise CodecError(f"{codec} carries floating-point tensors, not {flat.dtype}")
    grid, values = GRIDS[codec], flat.to(torch.float32).contiguous()
    if flat.device.type == "cpu":
        scales = torch.empty(-(-flat.numel() // BLOCK))
        codes = torch.empty(len(scales) * grid.block_bytes, dtype=torch.uint8)
        is_finite = rotate_and_quantise(
            values.numpy(), scales.numpy(), codes.numpy(), SIGNS, grid.magnitudes, grid.bounds,
            grid.bits, SMALLEST, LARGEST,
        )  # fmt: skip
        if not is_finite:
            raise _refusal(codec)
        return scales, codes
    scales, codes, is_sendable = rotated_there(values, codec)
    if not is_sendable:
        raise _refusal(codec)
    return scales, codes


def rotated_there(flat: Tensor, codec: str) -> tuple[Tensor, Tensor, Tensor]:
    """`rotated` in torch's operations for another device, and whether all values can be sent. Does not wait.

    Codes differ where a value is within rounding of a bound.
    """
    grid, device = GRIDS[codec], flat.device
    magnitudes, bounds = (torch.from_numpy(array).to(device) for array in (grid.magnitudes, grid.bounds))
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    absmax = rows.abs().amax(dim=1, keepdim=True)
    is_sendable = (absmax <= LARGEST).all()  # false also for NaN
    power = (absmax.view(torch.int32) & 0x7F800000).view(torch.float32)
    power = power.where(absmax >= SMALLEST, 0)
    x = (rows / power.where(power > 0, torch.inf)) @ rotation().to(device)
    squares = x.square().sum(dim=1, keepdim=True)
    x_by_rms = x / (squares / BLOCK).sqrt().where(squares > 0, torch.inf)
    levels = torch.bucketize(x_by_rms.abs(), bounds)
    product = (x.abs() * magnitudes[levels]).sum(dim=1, keepdim=True)
    scales = (squares / product.where(squares > 0, 1) * power).view(-1)
    codes = levels | (x < 0).to(levels.dtype) << (grid.bits - 1)
    parts = codes.view(len(rows), 8 // grid.bits, grid.block_bytes)
    shifts = torch.arange(0, 8, grid.bits, device=device).view(1, -1, 1)
    return scales, (parts << shifts).sum(dim=1).to(torch.uint8).view(-1), is_sendable


def rotated_back_there(codes: Tensor, codec: str) -> Tensor:
    """[blocks, 256] of codes uint8 on another device, for a scale of one each."""
    grid, device = GRIDS[codec], codes.device
    shifts = torch.arange(0, 8, grid.bits, device=device, dtype=torch.uint8).view(1, -1, 1)
    parts = codes.view(-1, 1, grid.block_bytes) >> shifts & (2**grid.bits - 1)
    centroids = torch.from_numpy(grid.centroids).to(device)
    return centroids[parts.view(-1, BLOCK).long()] @ rotation().to(device).T


def add(target: Floats, scales: Floats, codes: np.ndarray, codec: str, factor: float) -> None:
    """target ← target + factor·x, x being the values [any number] that scales and codes stand for."""
    grid = GRIDS[codec]
    add_rotated(target, scales, codes, SIGNS, grid.centroids, grid.bits, factor)


@cache
def rotation() -> Tensor:
    """[256, 256]: the signs, then the orthonormal Walsh-Hadamard matrix; for rows from the left."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.from_numpy(SIGNS)[:, None] * matrix / 16  # √256


def _refusal(codec: str) -> CodecError:
    return CodecError(f"NaN or infinite values, and those beyond {LARGEST:.1e}, cannot be sent as {codec}")
