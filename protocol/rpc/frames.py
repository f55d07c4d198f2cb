"""Framing on a byte stream: a fixed prefix, a msgpack header, then raw tensor bytes.

    prefix   magic "NLC1" | type u8 | header bytes u32 | payload bytes u64      big-endian, 17 bytes
    header   msgpack [request id, kind, body, [tensor spec …]]
    payload  the tensors' bytes, one after another

Every length is checked against its limit before memory is taken for it. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack

from protocol.codecs.codec import Encoded, TensorSpec, decoded_bytes, describe, parse_spec
from protocol.errors import WireError
from protocol.ground import Buffer, PeerId
from protocol.messages.frame import Frame, FrameType
from protocol.transport.base import Stream

MAGIC = b"NLC1"
MAX_HEADER_BYTES = 256 * 1024
MAX_TENSORS = 8
MOST_EXPANSION = 4  # of a class's bound on payloads: what int8 may take when it is decoded, and no codec more
_PREFIX = struct.Struct(">4sBIQ")


class FrameWatch:
    """A watch that is told of every frame moved, with when that began. This one has no clock and does nothing."""

    def now(self) -> float:
        return 0.0

    def sent(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        """Note that a frame was handed to the network, all of it."""

    def received(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        """Note that a frame was read, all of it."""


UNWATCHED = FrameWatch()


async def write_frame(
    stream: Stream,
    frame_type: FrameType,
    request_id: int,
    kind: str,
    body: object,
    tensors: Sequence[Encoded] = (),
) -> int:
    """Send one frame; returns its size in bytes. The tensors' memory must not change until this returns."""
    specs = [describe(tensor) for tensor in tensors]
    header: bytes = msgpack.packb([request_id, kind, body, specs])
    payload_bytes = sum(tensor.nbytes for tensor in tensors)
    prefix = _PREFIX.pack(MAGIC, frame_type, len(header), payload_bytes)
    await stream.write(prefix + header, *(buffer for tensor in tensors for buffer in tensor.buffers))
    return len(prefix) + len(header) + payload_bytes


class Prefix(NamedTuple):
    """The first bytes of a frame, not checked yet."""

    magic: bytes
    type_code: int
    header_bytes: int
    payload_bytes: int
    began: float  # when they came, on the clock of the `FrameWatch`


async def read_prefix(stream: Stream, watch: FrameWatch = UNWATCHED) -> Prefix:
    """Wait for the next frame of the stream to begin, without a deadline. Raises like `read_frame`."""
    magic, type_code, header_bytes, payload_bytes = _PREFIX.unpack(await stream.read(_PREFIX.size))
    return Prefix(magic, type_code, header_bytes, payload_bytes, watch.now())


async def read_frame(
    stream: Stream,
    max_payload: int,
    began_to_come: Callable[[FrameType, int], None] = lambda *_: None,
    prefix: Prefix | None = None,
) -> Frame:
    """The next frame of the stream, of which `prefix` may have been read; waits for it without a deadline.

    `began_to_come` is called with its type and request id once its header is there.

    Raises `WireError` when it is malformed or larger than allowed: the stream is then out of step and must
    be closed. Raises `PeerUnreachable` when the stream ends.
    """
    magic, type_code, header_bytes, payload_bytes, began = prefix or await read_prefix(stream)
    if magic != MAGIC:
        raise WireError(f"not a noloco frame: it begins with {magic!r}")
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(f"header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if payload_bytes > max_payload:
        raise WireError(f"payload of {payload_bytes} bytes; at most {max_payload} are allowed here")
    request_id, kind, body, specs = _parse_header(await stream.read(header_bytes), payload_bytes)
    if sum(map(decoded_bytes, specs)) > MOST_EXPANSION * max_payload:
        raise WireError(f"the tensors take more than {MOST_EXPANSION} times the {max_payload} bytes allowed")
    try:
        frame_type = FrameType(type_code)
    except ValueError:
        raise WireError(f"unknown frame type {type_code}") from None
    began_to_come(frame_type, request_id)
    payload = await stream.read(payload_bytes) if payload_bytes else b""
    return Frame(frame_type, request_id, kind, body, specs, payload, began)


def _parse_header(raw: Buffer, payload_bytes: int) -> tuple[int, str, object, tuple[TensorSpec, ...]]:
    try:
        header = msgpack.unpackb(raw, strict_map_key=False, max_array_len=4_096, max_map_len=4_096)
        request_id, kind, body, raw_specs = header
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError("malformed frame header") from error
    if not (isinstance(request_id, int) and 0 <= request_id < 2**63 and isinstance(kind, str)):
        raise WireError("malformed frame header")
    if not isinstance(raw_specs, list) or len(raw_specs) > MAX_TENSORS:
        raise WireError(f"at most {MAX_TENSORS} tensors are allowed in a frame")
    specs = tuple(parse_spec(spec, max_bytes=payload_bytes) for spec in raw_specs)
    if sum(spec.nbytes for spec in specs) != payload_bytes:
        raise WireError("the tensors' sizes do not add up to the payload")
    return request_id, kind, body, specs
