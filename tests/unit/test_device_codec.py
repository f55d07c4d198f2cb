"""A codec's bytes as a device makes them are those that the host makes, and come in one copy."""

from __future__ import annotations

import math

import pytest
import torch

from protocol.codecs.codec import Encoded, as_read, bytes_as_tensor, encode, nbytes_of
from protocol.codecs.device_codec import (
    NotSendable,
    decoded_there,
    packed,
    unpacked,
    unpacked_pieces,
)

EXACT = ["fp32", "fp16", "bf16", "int8"]
SHAPES = [(1,), (255,), (256,), (257,), (3, 1000), (2, 3, 64), (0,)]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).exp()


def arrived_of(codec: str, tensor: torch.Tensor) -> Encoded:
    """The tensor as the device encodes it, on the host."""
    there = packed(tensor, codec)
    return unpacked(codec, tensor.shape, there.raw, there.flag)


def bytes_of(encoded: Encoded) -> bytes:
    return b"".join(encoded.buffers)


@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_the_hosts(codec: str, shape: tuple[int, ...]) -> None:
    tensor = values(*shape)
    there = packed(tensor, codec)
    assert len(there.raw) == nbytes_of(codec, shape)  # a power of two is one in pinned memory
    arrived, here = unpacked(codec, shape, there.raw, there.flag), encode(tensor, codec)
    assert bytes_of(arrived) == bytes_of(here)
    assert (arrived.codec, arrived.shape, arrived.nbytes) == (here.codec, here.shape, here.nbytes)
    assert torch.equal(as_read(arrived), as_read(here))


@pytest.mark.parametrize("codec", [*EXACT, "eden4", "eden2"])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_they_are_read_there_as_here(codec: str, shape: tuple[int, ...]) -> None:
    encoded = encode(values(*shape), codec)
    read = decoded_there(codec, shape, bytes_as_tensor(encoded))
    assert read.shape == shape
    assert torch.allclose(read, as_read(encoded).float(), rtol=1e-6 if codec in EXACT else 1e-4, atol=1e-5)
    if codec in EXACT:
        assert torch.equal(read, as_read(encoded).float())


@pytest.mark.parametrize("codec", ["eden4", "eden2"])
def test_rotated_blocks_are_read_as_what_was_sent(codec: str) -> None:
    tensor = values(40, 256)
    arrived = arrived_of(codec, tensor)
    error = (as_read(arrived) - tensor).square().sum() / tensor.square().sum()
    assert error < {"eden4": 0.02, "eden2": 0.2}[codec]


@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("entries", [256, 1024])
@pytest.mark.parametrize("size", [1024, 2048, 2047, 2300, 100])
def test_pieces_of_one_copy_are_those_encoded_one_by_one(codec: str, entries: int, size: int) -> None:
    tensor = values(size)
    pieces = unpacked_pieces(codec, size, (made := packed(tensor, codec)).raw, made.flag, entries)
    expected = [encode(part, codec) for part in torch.split(tensor, entries)]
    assert [bytes_of(piece) for piece in pieces] == [bytes_of(piece) for piece in expected]
    assert [piece.shape for piece in pieces] == [piece.shape for piece in expected]


@pytest.mark.parametrize("codec", [*EXACT, "eden4"])
@pytest.mark.parametrize(("bad", "is_nan"), [(math.nan, True), (math.inf, False), (-math.inf, False)])
def test_what_is_not_finite_is_refused_where_it_arrives(codec: str, bad: float, is_nan: bool) -> None:
    tensor = values(600)
    tensor[300] = bad
    with pytest.raises(NotSendable, match=codec) as refusal:
        arrived_of(codec, tensor)
    assert refusal.value.is_nan == is_nan


def test_what_only_the_codec_makes_infinite_is_no_nan() -> None:
    with pytest.raises(NotSendable) as refusal:
        arrived_of("fp16", torch.tensor([1e6]))
    assert not refusal.value.is_nan
