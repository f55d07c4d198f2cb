"""eden4 and eden2: any block comes back within the error of a Gaussian one, from every path that encodes it."""

from __future__ import annotations

import hashlib
import math
import struct

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard
from scipy.stats import norm

from protocol.codecs import eden
from protocol.codecs.codec import Encoded, as_read, encode, nbytes_of, require_finite_values
from protocol.codecs.kernels import BLOCK
from protocol.errors import CodecError

# codec: squared error by squared norm expected of a block, and at most in a block made against the fixed rotation
ERRORS = {"eden4": (0.0096, 0.564), "eden2": (0.1332, 23.1)}
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def squared_error(tensor: torch.Tensor, codec: str) -> float:
    """By the squared norm."""
    error = (as_read(encode(tensor, codec)).double() - tensor.double()).square().sum()
    return float(error / tensor.double().square().sum())


def heavy_tailed(blocks: int) -> torch.Tensor:
    """Student's t with two degrees of freedom: its variance is infinite."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.standard_t(2, (blocks, BLOCK)).astype(np.float32))


@pytest.mark.parametrize("codec", ERRORS)
def test_the_centroids_are_those_of_lloyd_and_max(codec: str) -> None:
    grid = eden.GRIDS[codec]
    low, high = np.concatenate([[0], grid.bounds]), np.concatenate([grid.bounds, [np.inf]])
    share = norm.cdf(high) - norm.cdf(low)
    np.testing.assert_allclose(grid.magnitudes, (norm.pdf(low) - norm.pdf(high)) / share, rtol=1e-5)
    distortion = 1 - 2 * float(share @ grid.magnitudes.astype(np.float64) ** 2)
    assert distortion / (1 - distortion) == pytest.approx(ERRORS[codec][0], rel=2e-3)


@pytest.mark.parametrize("codec", ERRORS)
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "offset"])
def test_the_error_is_that_of_a_gaussian_whatever_the_values_are(codec: str, kind: str) -> None:
    blocks = heavy_tailed(400)
    if kind != "heavy":
        blocks = torch.randn(400, BLOCK, generator=torch.Generator().manual_seed(0))
    if kind == "offset":
        blocks += 1
    expected, _ = ERRORS[codec]
    errors = [squared_error(block, codec) for block in blocks]
    assert sum(errors) / len(errors) < expected * 1.05
    assert max(errors) < expected * 4  # a block in which one value is far beyond the last centroid


@pytest.mark.parametrize("codec", ERRORS)
def test_constant_blocks_are_no_worse(codec: str) -> None:
    for value in (1.0, -3e-5, 1e30):
        assert squared_error(torch.full((4 * BLOCK,), value), codec) < ERRORS[codec][0] * 1.6


@pytest.mark.parametrize("codec", ERRORS)
@pytest.mark.parametrize("position", [0, 1, 100, 255])
def test_a_single_outlier_comes_back_exactly(codec: str, position: int) -> None:
    block = torch.zeros(BLOCK)
    block[position] = -1234.5
    assert torch.allclose(as_read(encode(block, codec)), block, atol=1e-3)


@pytest.mark.parametrize("codec", ERRORS)
def test_the_worst_blocks_are_bounded(codec: str) -> None:
    """Those that the rotation gathers into one value."""
    rotation = eden.rotation()
    assert torch.allclose(rotation @ rotation.T, torch.eye(BLOCK), atol=1e-6)
    for column in (0, 1, 77, 255):
        error = squared_error(rotation[:, column].clone() * 7, codec)
        assert ERRORS[codec][1] * 0.99 < error < ERRORS[codec][1]


@pytest.mark.parametrize("codec", ERRORS)
@given(
    array=hnp.arrays(
        np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=30), elements=finite
    )
)
def test_any_shape_comes_back_within_the_bound(codec: str, array: np.ndarray) -> None:
    tensor = torch.from_numpy(np.array(array))
    encoded = encode(tensor, codec)
    assert encoded.nbytes == nbytes_of(codec, tensor.shape)
    assert encoded.nbytes == -(-tensor.numel() // BLOCK) * {"eden4": 132, "eden2": 68}[codec]
    require_finite_values(encoded)
    read = as_read(encoded)
    assert (read.dtype, read.shape) == (torch.float32, tensor.shape)
    blocks = zip(tensor.view(-1).double().split(BLOCK), read.view(-1).double().split(BLOCK), strict=True)
    for sent, received in blocks:
        if sent.numel() and sent.abs().max() >= eden.SMALLEST:
            assert (received - sent).norm() <= math.sqrt(ERRORS[codec][1]) * sent.norm() * 1.001
        else:
            assert not received.any()


@pytest.mark.parametrize("codec", ERRORS)
def test_what_is_read_has_the_projection_of_what_was_sent(codec: str) -> None:
    blocks = heavy_tailed(50)
    read = as_read(encode(blocks, codec))
    assert torch.allclose((read * blocks).sum(1), blocks.square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("codec", ERRORS)
def test_blocks_of_zeros_and_of_next_to_nothing_become_zeros(codec: str) -> None:
    tensor = torch.cat([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-37), torch.ones(3)])
    read = as_read(encode(tensor, codec))
    assert not read[: 2 * BLOCK].any()
    assert torch.allclose(read[2 * BLOCK :], torch.ones(3), atol=1.5)
    *there, _ = eden.rotated_there(tensor, codec)
    for part, other in zip(eden.rotated(tensor, codec), there, strict=True):
        assert torch.allclose(part.float(), other.float())
    assert not as_read(encode(torch.zeros(5), codec)).any()


@pytest.mark.parametrize("codec", ERRORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e36])
@pytest.mark.parametrize("position", [0, 255, 256, 299])
def test_values_that_are_not_finite_or_too_large_are_refused(codec: str, bad: float, position: int) -> None:
    tensor = torch.ones(300)
    tensor[position] = bad
    with pytest.raises(CodecError, match=codec):
        encode(tensor, codec)
    assert not eden.rotated_there(tensor, codec)[2]


@pytest.mark.parametrize("codec", ERRORS)
def test_the_largest_values_that_are_sent_are_read_as_finite(codec: str) -> None:
    for block in (torch.ones(BLOCK), eden.rotation()[:, 3].sign()):
        encoded = encode(block * eden.LARGEST, codec)
        require_finite_values(encoded)
        assert torch.isfinite(as_read(encoded)).all()
        assert squared_error(block * eden.LARGEST, codec) == pytest.approx(squared_error(block, codec))


@pytest.mark.parametrize("codec", ERRORS)
@given(data=st.data(), blocks=st.integers(1, 4))
def test_whatever_bytes_come_are_read_as_finite_when_their_scales_pass(
    codec: str, data: st.DataObject, blocks: int
) -> None:
    scales = [data.draw(st.floats(width=32)) for _ in range(blocks)]
    nbytes = nbytes_of(codec, [blocks * BLOCK]) - 4 * blocks
    code = data.draw(st.integers(0, 255))
    raw = struct.pack(f"<{blocks}f", *scales) + bytes([code]) * nbytes
    encoded = Encoded(codec, (blocks * BLOCK,), (memoryview(raw),))
    try:
        require_finite_values(encoded)
    except CodecError:
        return
    assert torch.isfinite(as_read(encoded)).all()


@pytest.mark.parametrize("codec", ERRORS)
@pytest.mark.parametrize("size", [1, 255, 256, 257, 100_000])
def test_the_compiled_loops_give_what_torch_gives_on_another_device(codec: str, size: int) -> None:
    flat = heavy_tailed(400).view(-1)[:size]
    scales, codes = eden.rotated(flat, codec)
    scales_there, codes_there, _ = eden.rotated_there(flat, codec)
    differing = (codes != codes_there).sum().item()
    assert differing <= 1 + 1e-4 * len(codes)  # values within rounding of a bound
    assert (~torch.isclose(scales, scales_there, rtol=1e-5)).sum().item() <= differing


@pytest.mark.parametrize("codec", ERRORS)
def test_a_power_of_two_changes_nothing_but_the_scales(codec: str) -> None:
    tensor = heavy_tailed(3)
    scales, codes = eden.rotated(tensor.view(-1), codec)
    larger, same = eden.rotated(tensor.view(-1) * 2.0**40, codec)
    assert torch.equal(codes, same)
    assert torch.equal(scales * 2.0**40, larger)


@pytest.mark.parametrize("codec", ERRORS)
def test_bytes_are_read_by_the_formula(codec: str) -> None:
    """Written out without the project's code: peers of different versions and machines must read the same."""
    bits, magnitudes = {
        "eden4": (4, [0.128395, 0.388048, 0.656759, 0.94234, 1.256231, 1.618046, 2.069017, 2.73259]),
        "eden2": (2, [0.45278, 1.510418]),
    }[codec]
    codes = np.random.default_rng(0).integers(0, 2**bits, BLOCK)
    parts = codes.reshape(8 // bits, -1)
    packed = sum(part << (bits * index) for index, part in enumerate(parts)).astype(np.uint8)
    half = 2 ** (bits - 1)
    centroids = np.where(codes < half, 1, -1) * np.array(magnitudes)[codes % half]
    digest = int.from_bytes(hashlib.sha256(b"noloco eden signs").digest(), "big")
    signs = np.array([-1.0 if digest >> (BLOCK - 1 - i) & 1 else 1.0 for i in range(BLOCK)])
    expected = signs * (hadamard(BLOCK) @ centroids) / 16 * 3.5
    raw = struct.pack("<f", 3.5) + packed.tobytes()
    read = as_read(Encoded(codec, (BLOCK,), (memoryview(raw),)))
    np.testing.assert_allclose(read.numpy(), expected, atol=1e-4)
    assert abs(digest.bit_count() - BLOCK / 2) < 3 * 8  # as random as signs should be
