"""Tensors as bytes: the codecs that activations, gradients, weights and token ids travel in.

A tensor goes over the wire as a `TensorSpec` inside a message header and raw little-endian bytes after it.

| codec | bytes per value | error of one value x |
|---|---|---|
| fp32 | 4 | none for float32 |
| fp16 | 2 | 2⁻¹¹·abs(x) down to 6e-5; beyond 65504 it becomes infinite |
| bf16 | 2 | 2⁻⁸·abs(x), the whole range of float32 |
| int8 | 1 + 1/64 | absmax/254, absmax being the largest magnitude among the 256 values of its block |
| eden4 | 0.5 + 1/64 | root mean square 0.098 of its block's (squared: 0.0096) |
| eden2 | 0.25 + 1/64 | root mean square 0.365 of its block's (squared: 0.133) |
| mod4, mod3, mod2 | 0.5, 0.375, 0.25, and 1/64 | of what two replicas differ by, see `protocol.codecs.lattice` |
| int32, int64 | 4, 8 | none; token ids |

The int8 bytes are one float32 scale (absmax/127) per block of 256 values in row-major order, the last block
possibly shorter, then one signed byte per value. Its bound holds up to the rounding of float32 (a relative
2e-5) for absmax ≥ 1.5e-36; a block smaller than that is sent as zeros.

The bytes of eden4 and eden2 (`codecs.eden`) are one float32 scale per block of 256 values, then 128 or 64 bytes
per block, the last one filled up with zeros. The errors in the table are expected ones, of 16 and 4 Lloyd-Max
centroids on a Gaussian (D = 0.0095 and 0.1175, as D/(1 − D)). A rotated block is close to that whatever it was
before, constant and heavy-tailed ones included; a block with few values other than zero comes out better. In blocks
made against the fixed rotation the error is at most 0.76·norm and 4.9·norm. Magnitudes lie between 3e-36 and 3e35:
a smaller block is sent as zeros, larger values are refused.

Those of mod4, mod3 and mod2 are a byte for each block's cell, three for its checksum, then 128, 96 or 64 for its
remainders. Only who holds nearly the same values can read them: `encode` and `decode` refuse, and `codecs.nearby`
has both.

Everything that raises here raises `CodecError`, whatever a peer sent; nothing here does I/O.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.codecs import eden, lattice
from protocol.codecs.kernels import BLOCK, add_quantised, quantise
from protocol.codecs.near_codecs import BITS
from protocol.errors import CodecError
from protocol.ground import Buffer

if sys.byteorder != "little":
    raise ImportError("noloco-node sends tensors as little-endian bytes; this machine is big-endian.")

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_INTEGERS = {"int32": torch.int32, "int64": torch.int64}
_DTYPES = {**FLOATS, **_INTEGERS}
_IN_BLOCKS = ("int8", *eden.GRIDS)  # scales, then the rest
FLOATING = (*FLOATS, *_IN_BLOCKS)
CODECS = (*FLOATS, *_IN_BLOCKS, *_INTEGERS)  # those that need nothing beside them

MAX_DIMS = 8
MAX_VALUES = 2**40  # keeps every product and stride far from the end of int64, also in shapes with a zero
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a subnormal scale would lose the digits the bound needs
# times 127 it is still finite
_LARGEST_SCALE = float(np.nextafter(np.float32(np.finfo(np.float32).max / 127), 0))
_NOT_FINITE = "NaN or infinite values cannot be sent as int8"
_PART = 1 << 22  # values worked on at a time on another device: 16 MiB for each float32 temporary


@dataclass(frozen=True)
class TensorSpec:
    """The facts that a receiver must know before the bytes: codec name, shape, number of bytes."""

    codec: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Encoded:
    """A tensor ready to be written: `buffers` one after the other are its bytes.

    The buffers are read-only views. Where the tensor was contiguous, on the CPU and of the codec's type they
    are views of the tensor's own memory: leave it unchanged until they have been written.
    """

    codec: str
    shape: tuple[int, ...]
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def nbytes_of(codec: str, shape: Sequence[int]) -> int:
    """The number of bytes that a tensor of `shape` has in `codec`. Raises `CodecError` for an impossible one."""
    values = _count(shape)
    if codec == "int8":
        return 4 * -(-values // BLOCK) + values
    if codec in eden.GRIDS:
        return eden.GRIDS[codec].nbytes_of(values)
    if codec in BITS:
        return lattice.nbytes_of(BITS[codec], values)
    dtype = _DTYPES.get(codec)
    if dtype is None:
        raise CodecError(f"unknown codec {codec[:20]!r}; known are {', '.join((*CODECS, *BITS))}")
    return values * dtype.itemsize


def torch_type(codec: str) -> torch.dtype:
    """The type that `encode` first gives to values: the codec's own, float32 for codecs in blocks."""
    return torch.float32 if codec in _IN_BLOCKS else _DTYPES[codec]


def decoded_bytes(spec: TensorSpec) -> int:
    """The memory that its tensor takes: float32 for what travels in blocks, else as many bytes as travel."""
    is_float32 = spec.codec in _IN_BLOCKS or spec.codec in BITS
    return 4 * math.prod(spec.shape) if is_float32 else spec.nbytes


def describe(encoded: Encoded) -> list[object]:
    """The msgpack form of the spec: [codec, [dimensions], nbytes]."""
    return [encoded.codec, list(encoded.shape), encoded.nbytes]


def parse_spec(obj: object, max_bytes: int) -> TensorSpec:
    """Check what a peer sent as `describe` and return it; no memory is allocated for the tensor.

    `max_bytes` bounds the bytes on the wire. The tensor of an int8 spec takes four times as much,
    of an eden4 spec eight and of an eden2 spec fifteen times.
    Raises `CodecError` unless codec, shape and nbytes are well-formed and fit together exactly.
    """
    if not isinstance(obj, list | tuple) or len(obj) != 3:
        raise CodecError("a tensor spec is not [codec, shape, nbytes]")
    codec, shape, nbytes = obj
    if not isinstance(codec, str) or not isinstance(shape, list | tuple) or type(nbytes) is not int:
        raise CodecError("a tensor spec has fields of the wrong types")
    expected = nbytes_of(codec, shape)
    if nbytes != expected:
        raise CodecError(f"{codec} of shape {list(shape)} has {expected} bytes, not as many as announced")
    if nbytes > max_bytes:
        raise CodecError(f"a tensor of {nbytes} bytes exceeds the limit of {max_bytes}")
    return TensorSpec(codec, tuple(shape), nbytes)


def encode(tensor: Tensor, codec: str) -> Encoded:
    """The bytes of `tensor`, of any shape and device, in `codec`; see `Encoded` for shared memory.

    Float codecs take floating tensors and convert them, integer codecs take integer tensors.
    Raises `CodecError` for other types, for integers that do not fit, and for NaN or infinity in int8,
    eden4 and eden2.
    """
    shape = tuple(tensor.shape)
    nbytes_of(codec, shape)  # refuses here what parse_spec would refuse there
    _require_no_lattice(codec)
    flat = tensor.detach().reshape(-1)
    if codec == "int8":
        return Encoded(codec, shape, _quantise(flat))
    if codec in eden.GRIDS:
        scales, codes = eden.rotated(flat, codec)
        return Encoded(codec, shape, (_bytes_of(scales.cpu()), _bytes_of(codes.cpu())))
    if codec in _INTEGERS:
        _require_integers(flat, _INTEGERS[codec])
    elif not flat.is_floating_point():
        raise CodecError(f"{codec} carries floating-point tensors, not {flat.dtype}")
    return Encoded(codec, shape, (_bytes_of(flat.to("cpu", _DTYPES[codec])),))


def decode(spec: TensorSpec, data: Buffer) -> Tensor:
    """The tensor in `data`, exactly `spec.nbytes` bytes: of the codec's own type, float32 where that is in blocks.

    Shares memory with `data` when that is writable (a bytearray) and aligned to the type, and keeps it
    alive; read-only bytes are copied, for torch has no read-only tensors. int8, eden4 and eden2 always make a new
    tensor.
    The values are whatever the peer sent, NaN included: see `require_finite`.
    Raises `CodecError` when spec and data do not fit together.
    """
    if nbytes_of(spec.codec, spec.shape) != spec.nbytes:
        raise CodecError(f"{spec.codec} of shape {list(spec.shape)} does not have {spec.nbytes} bytes")
    _require_no_lattice(spec.codec)
    view = memoryview(data)
    if not view.c_contiguous or view.nbytes != spec.nbytes:
        raise CodecError(f"{view.nbytes} bytes received for a tensor of {spec.nbytes}")
    if spec.codec not in _IN_BLOCKS:
        return _tensor_over(view, _DTYPES[spec.codec]).reshape(spec.shape)
    result = torch.zeros(spec.shape)
    add_scaled(result, Encoded(spec.codec, spec.shape, (view,)), 1.0)
    return result


def as_read(encoded: Encoded) -> Tensor:
    """The tensor as its receiver will read it, of its type and with the codec's losses."""
    spec = TensorSpec(encoded.codec, encoded.shape, encoded.nbytes)
    return decode(spec, encoded.buffers[0] if len(encoded.buffers) == 1 else b"".join(encoded.buffers))


def bytes_as_tensor(encoded: Encoded) -> Tensor:
    """The encoded bytes, uint8 [nbytes], over the same memory where that is writable and in one piece."""
    if len(encoded.buffers) == 1:
        return _tensor_over(encoded.buffers[0].cast("B"), torch.uint8)
    return _tensor_over(memoryview(bytearray().join(encoded.buffers)), torch.uint8)


def add_scaled(target: Tensor, encoded: Encoded, factor: float) -> None:
    """target ← target + factor·x, x being the tensor as its receiver reads it. No memory of x's size is taken.

    `target` is float32 on the CPU, contiguous and of as many values.
    """
    if encoded.codec not in _IN_BLOCKS:
        target.add_(as_read(encoded).view(target.shape), alpha=factor)
        return
    scales, rest = _parts(encoded)
    flat = target.view(-1).numpy()
    if encoded.codec == "int8":
        add_quantised(flat, rest.numpy(), scales.numpy(), factor)
    else:
        eden.add(flat, scales.numpy(), rest.numpy(), encoded.codec, factor)


def require_finite_values(encoded: Encoded) -> None:
    """Check the decoded tensor as `require_finite` does.

    Raises `CodecError`, in blocks also for scales close to infinity.
    """
    if encoded.codec in BITS:
        return  # remainders are finite whatever they are
    if encoded.codec in _IN_BLOCKS:
        most = 128 if encoded.codec == "int8" else eden.MOST_PER_SCALE
        require_finite(_parts(encoded)[0] * most)
    else:
        require_finite(as_read(encoded))


def require_finite(tensor: Tensor) -> Tensor:
    """`tensor` itself. Raises `CodecError` if any of its values is NaN or infinite."""
    if tensor.numel() and tensor.is_floating_point():
        # one pass and no temporary, where isfinite().all() makes a tensor of booleans: 27 times faster
        lowest, highest = torch.aminmax(tensor.detach())
        if not (math.isfinite(lowest.item()) and math.isfinite(highest.item())):
            raise CodecError("a tensor holds NaN or infinite values")
    return tensor


def _require_no_lattice(codec: str) -> None:
    if codec in BITS:
        raise CodecError(f"{codec} is for the weights of replicas alone, beside one's own")


def _count(shape: Sequence[int]) -> int:
    if len(shape) > MAX_DIMS:
        raise CodecError(f"a tensor of {len(shape)} dimensions; at most {MAX_DIMS} are allowed")
    if any(type(size) is not int or not 0 <= size <= MAX_VALUES for size in shape):
        raise CodecError(f"a dimension of a tensor is not an integer from 0 to {MAX_VALUES}")
    if math.prod(max(size, 1) for size in shape) > MAX_VALUES:
        raise CodecError(f"a tensor of more than {MAX_VALUES} values")
    return math.prod(shape)


def _require_integers(flat: Tensor, dtype: torch.dtype) -> None:
    if flat.is_floating_point() or flat.is_complex():
        raise CodecError(f"integer codecs carry integer tensors, not {flat.dtype}")
    if flat.dtype.itemsize > dtype.itemsize and not torch.equal(flat.to(dtype).to(flat.dtype), flat):
        raise CodecError(f"integers too large for {dtype}")


def _bytes_of(flat: Tensor) -> memoryview:
    """A read-only view of the bytes of a one-dimensional CPU tensor, which it keeps alive."""
    if not flat.numel():
        return memoryview(b"")  # memoryviews of length zero cannot be cast
    if flat.dtype is torch.bfloat16:
        flat = flat.view(torch.int16)  # numpy has no bfloat16
    return flat.contiguous().numpy().data.cast("B").toreadonly()


def _tensor_over(view: memoryview, dtype: torch.dtype) -> Tensor:
    """One-dimensional, over the memory of `view` if that is writable and aligned, over a copy otherwise."""
    if not view.nbytes:
        return torch.empty(0, dtype=dtype)
    array = np.frombuffer(view, np.uint8)
    if view.readonly or array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return torch.from_numpy(array).view(dtype)


def _quantise(flat: Tensor) -> tuple[memoryview, memoryview]:
    """Scales and signed bytes of a one-dimensional tensor, computed where it is: a GPU hands over less."""
    if not flat.is_floating_point():
        raise CodecError(f"int8 carries floating-point tensors, not {flat.dtype}")
    if flat.device.type != "cpu":
        there, signed, is_fine = quantised_there(flat)
        if not is_fine:
            raise CodecError(_NOT_FINITE)
        return _bytes_of(there.cpu()), _bytes_of(signed.cpu())
    values = torch.empty(flat.numel(), dtype=torch.int8)
    scales = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32)
    whole = flat.to(torch.float32).contiguous().numpy()
    if not quantise(whole, scales.numpy(), values.numpy(), _SMALLEST_SCALE, _LARGEST_SCALE):
        raise CodecError(_NOT_FINITE)
    return _bytes_of(scales), _bytes_of(values)


def quantised_there(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and signed bytes in torch's operations for another device, bit for bit the same, and whether all values
    are finite. Does not wait. Part by part, as temporaries are float32.
    """
    scales, values, is_fine = [], [], []
    for part in torch.split(flat, _PART):
        rows = torch.nn.functional.pad(part.to(torch.float32), (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scale = rows.abs().amax(dim=1, keepdim=True).div_(127)
        is_fine.append(torch.isfinite(scale).all())
        scale = scale.clamp_(max=_LARGEST_SCALE)
        scales.append(scale.where(scale >= _SMALLEST_SCALE, 0).view(-1))
        scale = scale.where(scale >= _SMALLEST_SCALE, torch.inf)  # x/inf = 0: too small a block becomes zeros
        values.append((rows / scale).round_().to(torch.int8).view(-1)[: part.numel()])
    return torch.cat(scales), torch.cat(values), torch.stack(is_fine).all()


def _parts(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Scales and the rest, one-dimensional; over the same memory where that is possible. To be read only."""
    if len(encoded.buffers) == 2:
        scales, rest = encoded.buffers
    else:
        (raw,) = encoded.buffers
        raw = raw.cast("B") if raw.nbytes else raw
        scale_bytes = 4 * -(-math.prod(encoded.shape) // BLOCK)
        scales, rest = raw[:scale_bytes], raw[scale_bytes:]
    dtype = torch.int8 if encoded.codec == "int8" else torch.uint8
    return _tensor_over(scales, torch.float32), _tensor_over(rest, dtype)
