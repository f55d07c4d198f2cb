"""Weights modulo a few bits: read exactly by whoever is near, never wrongly by whoever is not."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codecs.eden import rotation
from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import (
    MOST_POINTS,
    LatticePoints,
    as_sent,
    as_sent_there,
    cell_for,
    distance_of,
    nbytes_of,
    numbers_of,
    read_beside,
    read_beside_there,
    to_lattice,
    to_lattice_there,
)
from protocol.codecs.near_codecs import SPANNED
from protocol.codecs.nearby import NearPieces, encode_near
from protocol.errors import CodecError
from tests.far_device import far_device

BITS = sorted(SPANNED)
SEED = 7
FLOATS = st.floats(-(2.0**40), 2.0**40, width=32)


def gaussian(count: int, scale: float, number: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(number)) * scale


def by_value(flags: torch.Tensor, count: int) -> torch.Tensor:
    return flags.repeat_interleave(BLOCK)[:count]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 100_000])
def test_who_is_near_reads_what_the_sender_knows_was_sent(bits: int, count: int) -> None:
    weights, apart = gaussian(count, 1.0), 0.01
    cells = cell_for(torch.full((-(-count // BLOCK),), apart), bits)
    points = to_lattice(weights, cells, [SEED], bits)
    read, is_read = read_beside(weights + gaussian(count, apart, 1), points, [SEED])
    assert points.nbytes == nbytes_of(bits, count)
    assert points.nbytes == points.cells.numel() + 3 * points.checksums.numel() + points.remainders.numel()
    assert is_read.float().mean() > 0.95
    there = by_value(is_read, count)
    assert torch.equal(read[there], as_sent(weights, points, [SEED])[there])


@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_that_of_the_cell_however_large_the_weights(bits: int) -> None:
    """In units of what the two differ by: what docs/performance.md says."""
    for scale in (1.0, 1000.0):
        weights, apart = gaussian(200 * BLOCK, scale), 0.02
        points = to_lattice(weights, cell_for(torch.full((200,), apart), bits), [SEED], bits)
        error = (as_sent(weights, points, [SEED]) - weights).double()
        cell = 2.0 ** (math.ceil(4 * math.log2(apart * SPANNED[bits] / 2 ** (bits - 1))) / 4)
        assert error.square().mean().sqrt() == pytest.approx(cell / math.sqrt(12), rel=0.02)
        assert abs(error.mean()) < 4 * cell / math.sqrt(12 * len(error))


def test_the_error_is_none_on_average_over_the_dither() -> None:
    weights = gaussian(BLOCK, 1.0)
    cells = torch.full((1,), 0.5)
    read = torch.stack([as_sent(weights, to_lattice(weights, cells, [s], 3), [s]) for s in range(1_000)])
    assert (read.mean(0) - weights).abs().max() < 5 * 0.5 / math.sqrt(12 * 1_000)


# Two replicas that may be anything to each other: near, or far apart in one value or in all
ANYTHING: dict[str, Any] = {
    "own": hnp.arrays(np.float32, st.integers(1, 700), elements=FLOATS),
    "other": st.floats(-(2.0**40), 2.0**40, width=32),
    "apart": st.floats(2.0**-45, 2.0**20, width=32),
    "seed": st.integers(0, 2**63),
}


def is_read_right_or_not_at_all(bits: int, own: np.ndarray, other: float, apart: float, seed: int) -> bool:
    mine = torch.from_numpy(own)
    theirs = gaussian(len(own), apart, seed % 1_000) + mine if seed % 2 else torch.full_like(mine, other)
    points = to_lattice(theirs, torch.full((-(-len(own) // BLOCK),), apart), [seed], bits)
    read, is_read = read_beside(mine, points, [seed])
    there = by_value(is_read, len(own))
    return torch.equal(read, torch.where(there, as_sent(theirs, points, [seed]), mine))


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=100)
@given(**ANYTHING)
def test_a_block_is_read_right_or_not_at_all_however_far_apart_the_two_are(bits: int, **two: Any) -> None:
    assert is_read_right_or_not_at_all(bits, **two)


@pytest.mark.long
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=3_400)
@given(**ANYTHING)
def test_the_same_in_ten_thousand_cases(bits: int, **two: Any) -> None:
    assert is_read_right_or_not_at_all(bits, **two)


@settings(max_examples=60)
@given(
    number=st.integers(0, 10_000),
    count=st.integers(1, 1_500),
    bits=st.sampled_from(BITS),
    apart=st.sampled_from([0.0, 1e-3, 0.3, 30.0]),
)
def test_the_mean_of_a_pair_is_kept_where_both_read_a_block(
    number: int, count: int, bits: int, apart: float
) -> None:
    """mean = z + ½(ẑ of the partner − own ẑ), where either has not read a block both leave it as it is."""
    one = gaussian(count, 1.0, number)
    other = one + gaussian(count, apart, number + 1)
    cells = cell_for(torch.full((-(-count // BLOCK),), 0.3), bits)
    sent = [to_lattice(z, cells, [number], bits) for z in (one, other)]
    read_of_other, is_read_here = read_beside(one, sent[1], [number])
    read_of_one, is_read_there = read_beside(other, sent[0], [number])
    both = by_value(is_read_here & is_read_there, count)
    first = one + torch.where(both, (read_of_other - as_sent(one, sent[0], [number])) / 2, 0)
    second = other + torch.where(both, (read_of_one - as_sent(other, sent[1], [number])) / 2, 0)
    torch.testing.assert_close(first + second, one + other, rtol=0, atol=1e-5 * (1 + apart))


@pytest.mark.parametrize("bits", BITS)
def test_one_value_a_turn_off_is_always_noticed(bits: int) -> None:
    weights = gaussian(BLOCK, 1.0)
    points = to_lattice(weights, torch.full((1,), 0.1), [SEED], bits)
    for place in range(BLOCK):
        off = torch.zeros(BLOCK)
        off[place] = 0.1 * 2**bits * 1.19
        read, is_read = read_beside(weights + off @ rotation().T, points, [SEED])
        assert not is_read.any()
        assert read.isfinite().all()


@settings(max_examples=60)
@given(bits=st.sampled_from(BITS), blocks=st.integers(1, 3), data=st.data())
def test_whatever_a_peer_sends_is_read_as_finite_numbers(bits: int, blocks: int, data: st.DataObject) -> None:
    def of(size: int) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8
        )

    checksums = of(4 * blocks).view(torch.int32) & 0xFFFFFF
    points = LatticePoints(bits, blocks * BLOCK, of(blocks), checksums, of(blocks * 32 * bits))
    own = gaussian(blocks * BLOCK, data.draw(st.sampled_from([0.0, 1.0, 1e30])))
    read, _ = read_beside(own, points, [SEED])
    assert read.isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(CodecError, match="cannot be sent as mod3"):
        to_lattice(torch.tensor([1.0, wrong]), torch.ones(1), [SEED], 3)
    with pytest.raises(CodecError, match="cannot be sent as mod3"):
        to_lattice(torch.ones(2), torch.tensor([wrong]), [SEED], 3)


def test_a_cell_too_small_for_the_weights_is_made_larger() -> None:
    weights = gaussian(BLOCK, 1e6)
    points = to_lattice(weights, torch.full((1,), 1e-9), [SEED], 2)
    needed = float((weights @ rotation()).abs().max()) / MOST_POINTS
    assert needed <= 2.0 ** ((int(points.cells[0]) - 160) / 4) <= 1.2 * needed


def test_how_far_two_blocks_are_apart() -> None:
    one, other = torch.zeros(BLOCK + 4), torch.cat([torch.full((BLOCK,), 3.0), torch.full((4,), 2.0)])
    assert distance_of(one, other).tolist() == [3.0, 2.0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 256, 300, 4096])
def test_torch_on_another_device_and_the_compiled_loops_are_one_codec(bits: int, count: int) -> None:
    weights, near = gaussian(count, 1.0), gaussian(count, 1.0) + gaussian(count, 0.01, 1)
    near[:BLOCK] += 9  # not read
    cells = cell_for(torch.full((-(-count // BLOCK),), 0.01), bits)
    numbers = numbers_of((SEED,), len(cells), weights.device)
    here, there = to_lattice(weights, cells, [SEED], bits), to_lattice_there(weights, cells, numbers, bits)[0]
    for name in ("cells", "checksums", "remainders"):
        assert torch.equal(getattr(here, name), getattr(there, name))
    assert torch.allclose(as_sent(weights, here, [SEED]), as_sent_there(weights, there, numbers), atol=1e-5)
    one, other = read_beside(near, here, [SEED]), read_beside_there(near, there, numbers)
    assert torch.allclose(one[0], other[0], atol=1e-5)
    assert torch.equal(one[1], other[1])
    assert not one[1][0]
    assert bool(one[1][1:].all()) or bits == 2


@pytest.mark.parametrize("codec", ["mod4", "mod3", "mod2"])
@pytest.mark.parametrize("last", [1024, 300, 1])
def test_several_pieces_in_one_go_are_those_one_by_one(codec: str, last: int) -> None:
    seeds, count = [7, 2**32 - 1, 9], 2 * 1024 + last
    weights = torch.arange(count, dtype=torch.float32).remainder_(601).sub_(300) / 64  # exact, rotated too
    near = weights + gaussian(count, 0.01)
    near[1024 : 1024 + BLOCK] += 9  # not read
    cells = torch.full((-(-count // BLOCK),), 0.25)
    parts, own = weights.split(1024), near.split(1024)
    sent = encode_near(weights, codec, cells, seeds, 1024)
    alone = [
        encode_near(part, codec, cells[: -(-len(part) // BLOCK)], [seed], 1024)
        for part, seed in zip(parts, seeds, strict=True)
    ]
    assert [(e.shape, b"".join(e.buffers)) for e in sent] == [(e.shape, b"".join(e.buffers)) for [e] in alone]
    together = NearPieces(sent, seeds, 1024)
    single = [NearPieces(piece, [seed], 1024) for piece, seed in zip(alone, seeds, strict=True)]
    one_by_one = [piece.as_sent(part) for piece, part in zip(single, parts, strict=True)]
    assert torch.allclose(together.as_sent(weights), torch.cat(one_by_one), atol=1e-5)
    read, is_read = together.read_beside(near)
    apart = [piece.read_beside(part) for piece, part in zip(single, own, strict=True)]
    assert torch.allclose(read, torch.cat([values for values, _ in apart]), atol=1e-5)
    assert torch.equal(is_read, torch.cat([blocks for _, blocks in apart]))
    assert is_read.tolist().count(False) == 1


@pytest.mark.parametrize("codec", ["mod4", "mod3", "mod2"])
def test_another_device_is_waited_for_once_and_has_the_same_bytes(codec: str) -> None:
    """Sixteen pieces are encoded in one wait, for their bytes, and read in none."""
    seeds, each = list(range(16)), 1024
    weights = torch.arange(16 * each - 100, dtype=torch.float32).remainder_(601).sub_(300) / 64  # exact
    near = weights + gaussian(len(weights), 0.01)
    near[1024 : 1024 + BLOCK] += 9  # not read
    cells = torch.full((-(-len(weights) // BLOCK),), 0.25)
    here = encode_near(weights, codec, cells, seeds, each)
    travelled = NearPieces(here, seeds, each)
    sent, (read, is_read) = travelled.as_sent(weights), travelled.read_beside(near)
    with far_device() as device:
        far, far_near, far_cells = map(device.holding, (weights, near, cells))
        there = encode_near(far, codec, far_cells, seeds, each)
        assert (device.waits, device.launches) == (1, pytest.approx(40, abs=5))
        travelled = NearPieces(there, seeds, each)
        far_sent, (far_read, far_is_read) = travelled.as_sent(far), travelled.read_beside(far_near)
        assert device.waits == 1
        assert device.launches < 100
        found = [tensor.cpu() for tensor in (far_sent, far_read, far_is_read)]
    assert [b"".join(e.buffers) for e in there] == [b"".join(e.buffers) for e in here]
    assert torch.equal(found[0], sent)
    assert torch.allclose(found[1], read, atol=1e-5)
    assert torch.equal(found[2], is_read)


def test_another_device_refuses_what_is_no_number() -> None:
    weights = gaussian(4 * BLOCK, 1.0)
    weights[700] = math.nan
    with far_device() as device, pytest.raises(CodecError, match="mod3"):
        encode_near(device.holding(weights), "mod3", device.holding(torch.ones(4)), [1, 2], 2 * BLOCK)


def test_the_bytes_are_the_same_in_every_version() -> None:
    weights = torch.arange(600, dtype=torch.float32).sub_(300) / 64  # exact in float32, rotated too
    points = to_lattice(weights, torch.full((3,), 0.25), [SEED], 3)
    told = b"".join(
        tensor.numpy().astype(kind).tobytes()
        for tensor, kind in ((points.cells, "u1"), (points.checksums, "<u4"), (points.remainders, "u1"))
    )
    assert hashlib.sha256(told).hexdigest()[:16] == "0fac3c67dd6a58d1"
