"""The compiled loops: the same numbers as torch's operations, for every length and for the worst of values."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.codecs import codec, kernels

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(1, 3 * kernels.BLOCK), elements=numbers)


@given(values=vectors)
def test_quantising_on_the_cpu_gives_the_bytes_that_another_device_gives(values: np.ndarray) -> None:
    flat = torch.from_numpy(values)
    *there, is_fine = codec.quantised_there(flat)
    assert is_fine
    assert [bytes(part) for part in codec._quantise(flat)] == [part.numpy().tobytes() for part in there]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@given(size=st.integers(1, 3 * kernels.BLOCK), data=st.data())
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    value: float, size: int, data: st.DataObject
) -> None:
    values = np.ones(size, np.float32)
    values[data.draw(st.integers(0, size - 1))] = value
    scales, quantised = np.empty(-(-size // kernels.BLOCK), np.float32), np.empty(size, np.int8)
    assert not kernels.quantise(values, scales, quantised, 1e-38, 1e36)


@given(values=vectors, factor=st.floats(-4, 4, width=32))
def test_what_is_added_is_what_was_quantised(values: np.ndarray, factor: float) -> None:
    scales = np.empty(-(-len(values) // kernels.BLOCK), np.float32)
    quantised = np.empty(len(values), np.int8)
    assert kernels.quantise(np.clip(values, -1e30, 1e30), scales, quantised, 1e-37, 1e36)
    target = np.ones(len(values), np.float32)
    kernels.add_quantised(target, quantised, scales, factor)
    read = quantised * np.repeat(scales, kernels.BLOCK)[: len(values)].astype(np.float64)
    np.testing.assert_allclose(target, 1 + factor * read, rtol=1e-5, atol=1e-5 * np.abs(read).max())
