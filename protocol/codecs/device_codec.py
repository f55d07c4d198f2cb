"""Tensors in a codec's bytes where they are computed, on a GPU: the bytes alone go up and down, and nobody waits.

`packed` launches what makes the bytes and the one number that tells whether all values can be sent; two copies bring
both, and `unpacked` looks at them on the host. `decoded_there` is the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.codecs import eden
from protocol.codecs.codec import FLOATS, Encoded, nbytes_of, quantised_there
from protocol.codecs.kernels import BLOCK
from protocol.errors import CodecError

SENDABLE, NAN, TOO_LARGE = 1, 0, 2  # NaN is in it; it has none, but what the codec makes of it is not finite


@dataclass(frozen=True)
class Packed:
    """On the device, once what was launched has run: `raw` uint8 [bytes of the codec] and `flag` int32 [1].

    Apart, since pinned memory is given by powers of two, which the bytes often are.
    """

    codec: str
    shape: tuple[int, ...]
    raw: Tensor
    flag: Tensor


@torch.no_grad()
def packed(tensor: Tensor, codec: str) -> Packed:
    """A floating-point tensor of any shape in a floating-point codec's bytes, on its device. Does not wait."""
    nbytes_of(codec, tuple(tensor.shape))
    flat = tensor.detach().reshape(-1)
    if codec in FLOATS:
        parts = [flat.to(FLOATS[codec]).contiguous()]
        is_fine = parts[0].isfinite().all()
    elif codec == "int8":
        *parts, is_fine = quantised_there(flat)
    else:
        *parts, is_fine = eden.rotated_there(flat.float(), codec)
    flag = torch.where(is_fine, SENDABLE, torch.where(flat.isnan().any(), NAN, TOO_LARGE)).to(torch.int32)
    raw = (
        torch.cat([part.view(torch.uint8) for part in parts])
        if len(parts) > 1
        else parts[0].view(torch.uint8)
    )
    return Packed(codec, tuple(tensor.shape), raw, flag.view(1))


def unpacked(codec: str, shape: Sequence[int], raw: Tensor, flag: Tensor) -> Encoded:
    """The encoded tensor that has arrived of a `Packed`: a view of its `raw` on the host. Raises `NotSendable`."""
    if (found := int(flag)) != SENDABLE:
        raise NotSendable(codec, is_nan=found == NAN)
    return Encoded(codec, tuple(shape), _buffers(codec, math.prod(shape), raw))


class NotSendable(CodecError):
    """A tensor that its codec cannot carry; `is_nan`: that is none of the codec's doing."""

    def __init__(self, codec: str, is_nan: bool) -> None:
        super().__init__(f"NaN or infinite values cannot be sent as {codec}")
        self.is_nan = is_nan


def unpacked_pieces(codec: str, values: int, raw: Tensor, flag: Tensor, entries: int) -> list[Encoded]:
    """Unpacks a one-dimensional tensor of a codec for gossip, in pieces of so many entries, all whole blocks
    but the last. Raises `NotSendable`.
    """
    whole = unpacked(codec, [values], raw, flag)
    cuts = [(start, min(start + entries, values)) for start in range(0, values, entries)]
    return [
        Encoded(codec, (stop - start,), tuple(_part(buffer, start, stop, values) for buffer in whole.buffers))
        for start, stop in cuts
    ]


def _part(buffer: memoryview, start: int, stop: int, values: int) -> memoryview:
    """Bytes from entry `start` to `stop` of values, or of their scales, of which a block's first entry has one."""
    size = buffer.nbytes // values
    return (
        buffer[start * size : stop * size] if size else buffer[4 * (start // BLOCK) : 4 * -(-stop // BLOCK)]
    )


def _buffers(codec: str, values: int, data: Tensor) -> tuple[memoryview, ...]:
    view = data.numpy().data.cast("B").toreadonly() if len(data) else memoryview(b"")
    if codec in FLOATS:
        return (view,)
    scales = 4 * -(-values // BLOCK)
    return view[:scales], view[scales:]


@torch.no_grad()
def decoded_there(codec: str, shape: Sequence[int], data: Tensor) -> Tensor:
    """The float32 tensor of a floating-point codec's bytes, uint8 [bytes], on their device. Does not wait."""
    if codec in FLOATS:
        return data.view(FLOATS[codec]).to(torch.float32).view(*shape)
    values = math.prod(shape)
    scale_bytes = 4 * -(-values // BLOCK)
    by_block, rest = data[:scale_bytes].view(torch.float32)[:, None], data[scale_bytes:]
    if codec == "int8":
        numbers = torch.nn.functional.pad(rest.view(torch.int8), (0, -values % BLOCK))
        rows = numbers.view(-1, BLOCK).to(torch.float32)
    else:
        rows = eden.rotated_back_there(rest, codec)
    return (rows * by_block).view(-1)[:values].view(*shape)
