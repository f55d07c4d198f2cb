"""The tensor codecs: what is sent comes back, and nothing that a peer can send does harm."""

from __future__ import annotations

import math
import struct

import hypothesis.extra.numpy as hnp
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.codecs.codec import (
    CODECS,
    Encoded,
    TensorSpec,
    add_scaled,
    as_read,
    decode,
    describe,
    encode,
    nbytes_of,
    parse_spec,
    require_finite,
    require_finite_values,
)
from protocol.codecs.kernels import BLOCK
from protocol.errors import CodecError

EXACT = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}
FLOATS = ("fp32", "fp16", "bf16", "int8")
ROTATED = ("eden4", "eden2")
LIMIT = 1 << 30
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)


def joined(encoded: Encoded) -> bytearray:
    return bytearray(b"".join(encoded.buffers))


def over_the_wire(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    encoded = encode(tensor, codec)
    header = msgpack.unpackb(msgpack.packb(describe(encoded)))
    return decode(parse_spec(header, LIMIT), joined(encoded))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("codec", EXACT)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_a_tensor_of_the_codecs_own_type_comes_back_exactly(
    codec: str, shape: tuple[int, ...], seed: int
) -> None:
    tensor = random_tensor(shape, EXACT[codec], seed)
    encoded = encode(tensor, codec)
    assert encoded.nbytes == nbytes_of(codec, shape) == tensor.numel() * tensor.element_size()
    result = over_the_wire(tensor, codec)
    assert result.dtype == EXACT[codec]
    assert result.shape == tensor.shape
    assert torch.equal(result, tensor)


@pytest.mark.parametrize("codec", FLOATS)
def test_transposed_strided_and_expanded_tensors_arrive_in_row_major_order(codec: str) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    for view in (tensor.T, tensor[::2, 1::3], tensor[:1].expand(5, 6), tensor[2, 3]):
        result = over_the_wire(view, codec)
        assert result.shape == view.shape
        assert torch.allclose(result.float(), view, atol=0.1)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
def test_nan_and_infinity_travel_in_the_plain_float_codecs(codec: str) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=EXACT[codec])
    assert torch.equal(over_the_wire(tensor, codec), tensor) is False  # NaN
    assert encode(over_the_wire(tensor, codec), codec).buffers[0] == encode(tensor, codec).buffers[0]


@given(
    array=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=600),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
        fill=st.floats(-10, 10, width=32),
    )
)
def test_int8_is_within_absmax_over_254_of_every_value_of_a_block(array: np.ndarray) -> None:
    tensor = torch.from_numpy(np.array(array))
    result = over_the_wire(tensor, "int8")
    assert result.dtype == torch.float32
    assert result.shape == tensor.shape
    for sent, received in zip(
        tensor.double().reshape(-1).split(BLOCK), result.double().reshape(-1).split(BLOCK), strict=True
    ):
        if sent.numel():
            bound = sent.abs().max() / 254
            assert (sent - received).abs().max() <= bound * (1 + 1e-4) + 1.5e-36


def test_int8_of_the_largest_and_of_the_smallest_floats_stays_within_its_bound() -> None:
    info = torch.finfo(torch.float32)
    for scale in (info.max, info.tiny * 127, info.tiny, 1e-45):
        tensor = torch.tensor([scale, -scale, scale / 2, 0.0])
        result = over_the_wire(tensor, "int8")
        assert (tensor.double() - result.double()).abs().max() <= scale / 254 * (1 + 1e-4) + 1.5e-36
        require_finite(result)


def test_int8_blocks_do_not_disturb_each_other() -> None:
    tensor = torch.cat([torch.full((BLOCK,), 1e6), torch.full((3,), 1e-6), torch.zeros(0)])
    assert torch.allclose(over_the_wire(tensor, "int8"), tensor, rtol=1e-6)


def test_int8_of_many_blocks_and_a_short_last_one_equals_the_formula() -> None:
    tensor = random_tensor((2 * 4096 * BLOCK + 77,), torch.float32)
    padded = torch.nn.functional.pad(tensor, (0, BLOCK - 77)).view(-1, BLOCK)
    scale = padded.abs().amax(1, keepdim=True) / 127
    expected = ((padded / scale).round() * scale).view(-1)[: tensor.numel()]
    assert torch.equal(over_the_wire(tensor, "int8"), expected)
    assert encode(tensor, "int8").nbytes == tensor.numel() + 4 * (2 * 4096 + 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 255, 256, 299])
def test_int8_refuses_values_that_are_not_finite(bad: float, position: int) -> None:
    tensor = torch.ones(300)
    tensor[position] = bad
    with pytest.raises(CodecError, match="int8"):
        encode(tensor, "int8")


def test_int8_scales_that_are_nan_give_a_tensor_that_require_finite_refuses() -> None:
    spec = TensorSpec("int8", (2,), 6)
    data = bytearray(np.array([math.nan], np.float32).tobytes() + b"\x01\x02")
    with pytest.raises(CodecError, match="NaN"):
        require_finite(decode(spec, data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_require_finite(dtype: torch.dtype) -> None:
    for values in ([], [1.0, -2.0]):
        tensor = torch.tensor(values, dtype=dtype)
        assert require_finite(tensor) is tensor
    require_finite(torch.tensor(3, dtype=torch.int64))
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(CodecError):
            require_finite(torch.tensor([0.0, bad, 0.0], dtype=dtype))


def test_encoding_copies_nothing_when_it_need_not() -> None:
    for codec in ("fp32", "fp16", "bf16", "int64"):
        tensor = torch.zeros(8, dtype=EXACT[codec])
        buffer = encode(tensor.view(2, 4), codec).buffers[0]
        tensor.fill_(1)
        assert buffer == encode(torch.ones_like(tensor), codec).buffers[0]
        assert buffer.readonly


def test_gradients_are_left_behind() -> None:
    assert over_the_wire(torch.ones(3, requires_grad=True), "fp32").requires_grad is False


def test_decoding_shares_writable_memory_and_copies_read_only_bytes() -> None:
    data = bytearray(8)
    spec = TensorSpec("fp32", (2,), 8)
    shared, copied = decode(spec, data), decode(spec, bytes(data))
    data[:4] = np.float32(1).tobytes()
    assert shared.tolist() == [1, 0]
    assert copied.tolist() == [0, 0]
    copied[0] = 5  # neither writes into bytes nor warns


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("offset", range(1, 9))
def test_tensors_are_read_from_the_middle_of_a_larger_buffer(codec: str, offset: int) -> None:
    tensor = random_tensor((3, 100), EXACT.get(codec, torch.float32))
    encoded = encode(tensor, codec)
    spec = parse_spec(describe(encoded), LIMIT)
    whole = bytearray(offset) + joined(encoded) + bytearray(5)
    result = decode(spec, memoryview(whole)[offset : offset + spec.nbytes])
    assert torch.equal(result, decode(spec, bytes(joined(encoded))))


def test_integers_of_other_widths_are_converted_only_when_they_fit() -> None:
    assert over_the_wire(torch.tensor([1, 255], dtype=torch.uint8), "int32").tolist() == [1, 255]
    assert over_the_wire(torch.tensor([1, -7]), "int32").tolist() == [1, -7]
    with pytest.raises(CodecError, match="too large"):
        encode(torch.tensor([2**31]), "int32")


@pytest.mark.parametrize("codec", [*FLOATS, *ROTATED])
def test_float_codecs_refuse_integers(codec: str) -> None:
    with pytest.raises(CodecError):
        encode(torch.tensor([1]), codec)


@pytest.mark.parametrize("codec", ["int32", "int64"])
def test_integer_codecs_refuse_floats(codec: str) -> None:
    with pytest.raises(CodecError):
        encode(torch.tensor([1.0]), codec)


def test_unknown_codecs_and_too_many_dimensions_are_refused_by_the_sender_too() -> None:
    with pytest.raises(CodecError, match="unknown codec"):
        encode(torch.ones(2), "fp8")
    with pytest.raises(CodecError, match="dimensions"):
        encode(torch.ones((1,) * 9), "fp32")


@pytest.mark.parametrize(
    "obj",
    [
        None,
        b"fp32",
        ["fp32", [2]],
        ["fp32", [2], 8, 8],
        ["fp64", [2], 16],
        [b"fp32", [2], 8],
        ["fp32", 2, 8],
        ["fp32", [2], 8.0],
        ["fp32", [2], True],
        ["fp32", [2.0], 8],
        ["fp32", [True], 4],
        ["fp32", ["2"], 8],
        ["fp32", [-1, -2], 8],
        ["fp32", [2], 7],
        ["fp32", [2], 9],
        ["fp32", [1] * 9, 4],
        ["fp32", [2**40 + 1], 4 * 2**40 + 4],
        ["fp32", [2**40, 2**40], 4 * 2**80],
        ["fp32", [0, 2**40, 2**40], 0],
        ["fp32", [2**300], 4 * 2**300],
        ["fp32", [10**5000], 4],
        ["fp32", [2], 10**5000],  # an integer that Python refuses to print
        ["int8", [256], 256],
        ["eden4", [256], 128],
        ["eden4", [257], 264 - 127],
        ["eden4", [], 0],
        ["eden4", [0], 132],
        ["eden4", [2**40 + 1], 2**39],
        ["eden4", [-256], -132],
        ["eden2", [256], 132],
        ["eden3", [256], 100],
        ["fp32", [2**30], 2**32],
        [{}, [2], 8],
    ],
)
def test_specs_that_do_not_fit_together_are_refused(obj: object) -> None:
    with pytest.raises(CodecError):
        parse_spec(obj, LIMIT)


def test_the_limit_of_bytes_is_inclusive() -> None:
    assert parse_spec(["fp32", [2], 8], 8) == TensorSpec("fp32", (2,), 8)
    with pytest.raises(CodecError, match="limit"):
        parse_spec(["fp32", [3], 12], 11)


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
near_specs = st.tuples(
    st.sampled_from(CODECS) | garbage,
    st.lists(st.integers(-1, 6) | st.sampled_from([2**40, 2**63, 2**64]), max_size=9) | garbage,
    st.integers(-1, 200) | garbage,
).map(list)


@given(obj=garbage | near_specs)
def test_parsing_garbage_raises_only_codec_errors(obj: object) -> None:
    try:
        spec = parse_spec(obj, 10_000)
    except CodecError:
        return
    assert spec.nbytes == nbytes_of(spec.codec, spec.shape) <= 10_000


@given(
    codec=st.sampled_from([*CODECS, "fp8", ""]),
    shape=st.lists(st.integers(-1, 4), max_size=5),
    data=st.binary(max_size=40),
    exact=st.booleans(),
)
def test_decoding_garbage_raises_only_codec_errors(
    codec: str, shape: list[int], data: bytes, exact: bool
) -> None:
    try:
        nbytes = nbytes_of(codec, shape)
        if exact:
            data = (data * nbytes)[:nbytes] if data else bytes(nbytes)
        result = decode(TensorSpec(codec, tuple(shape), nbytes), data)
    except CodecError:
        return
    assert list(result.shape) == shape


def test_decoding_checks_a_spec_that_was_never_parsed() -> None:
    for spec in (TensorSpec("fp32", (2,), 4), TensorSpec("fp32", (-1,), 4), TensorSpec("nope", (1,), 4)):
        with pytest.raises(CodecError):
            decode(spec, bytearray(4))


def test_decoding_refuses_memory_with_gaps() -> None:
    with pytest.raises(CodecError):
        decode(TensorSpec("int8", (0,), 0), memoryview(b"abcd")[::2])
    with pytest.raises(CodecError):
        decode(TensorSpec("fp32", (1,), 4), memoryview(bytearray(8))[::2])


# --- without a tensor in between -----------------------------------------------------------------


@pytest.mark.parametrize("codec", [*FLOATS, *ROTATED])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1024 * 256 + 300])
@pytest.mark.parametrize("is_received", [False, True])
def test_what_is_added_is_what_decoding_gives(codec: str, size: int, is_received: bool) -> None:
    tensor, target = torch.randn(size), torch.randn(size)
    encoded = encode(tensor, codec)
    if is_received:  # one buffer, as it comes off the wire
        encoded = Encoded(codec, encoded.shape, (memoryview(bytearray(b"".join(encoded.buffers))),))
    expected = target + 0.3 * as_read(encoded).to(torch.float32)
    add_scaled(target, encoded, 0.3)
    assert torch.allclose(target, expected, atol=2e-6)
    require_finite_values(encoded)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_found_in_their_encoding(codec: str, value: float) -> None:
    tensor = torch.randn(300)
    tensor[7] = value
    with pytest.raises(CodecError, match="NaN or infinite"):
        require_finite_values(encode(tensor, codec))


@pytest.mark.parametrize("codec", ["int8", *ROTATED])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 3e38])
def test_scales_that_would_give_infinite_values_are_found(codec: str, scale: float) -> None:
    scales, values = encode(torch.randn(300), codec).buffers
    raw = bytearray(scales) + bytearray(values)
    raw[:4] = struct.pack("<f", scale)
    encoded = Encoded(codec, (300,), (memoryview(raw),))
    with pytest.raises(CodecError, match="NaN or infinite"):
        require_finite_values(encoded)
    if not math.isfinite(scale):
        with pytest.raises(CodecError, match="NaN or infinite"):
            require_finite(as_read(encoded))
