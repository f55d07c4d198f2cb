"""One end of a hop over hivemind's P2P, in each of the three ways that it offers.

    binary_stream    one stream for all messages: `P2P.send_raw_data` with its length prefix, 8 bytes back for each
    protobuf_stream  a stream for each message, its tensor serialised and cut into parts as hivemind's experts do
    unary            the serialised tensor in as few messages as its limit of 4 MiB allows, all of a tensor at once

hivemind is as it installs itself, but for bf16, which it would send as float32 (USE_LEGACY_BFLOAT16).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

os.environ["USE_LEGACY_BFLOAT16"] = "0"  # hivemind reads it when it is imported

import torch
import uvloop
from averaging.coordination import Message
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import runtime_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming
from hops.activations import (
    SMALL_BYTES,
    bytes_of,
    checksum,
    keep_in_flight,
    make_activations,
    round_trip,
    round_trip_during,
)
from hops.serving import serve_commands

HEADROOM = 64 * 1024  # of a unary message, for its envelope
ACKNOWLEDGEMENT = bytes(8)
TRIES = 3  # at most, of a protobuf stream


class TlsP2P(P2P):
    """Encrypts as this project's p2pd does, so that what encryption costs does not decide."""

    @staticmethod
    def _make_process_args(*arguments: Any, **flags: Any) -> list[str]:
        return P2P._make_process_args(*arguments, noise=False, **flags)


class HivemindHop:
    """Mutable state: P2P, the other end, open streams, who waits for an answer, what came last or in part."""

    def __init__(self, settings: Message) -> None:
        self._host: str = settings["host"]
        self._p2p_type = TlsP2P if settings["encryption"] == "tls" else P2P
        self._activations = make_activations()
        self._received: bytes | torch.Tensor = b""
        self._numbers = itertools.count()
        self._incomplete: dict[int, dict[int, Any]] = {}  # unary parts by message and place

    async def start(self) -> Message:
        torch.set_num_threads(1)
        self._p2p = await self._p2p_type.create(host_maddrs=[f"/ip4/{self._host}/tcp/0"])
        await self._p2p.add_binary_stream_handler("binary", self._on_binary)
        await self._p2p.add_binary_stream_handler("small", self._on_small)
        await self._p2p.add_protobuf_handler(
            "stream", self._on_parts, runtime_pb2.ExpertRequest, stream_input=True
        )
        await self._p2p.add_protobuf_handler("unary", self._on_unary, runtime_pb2.ExpertRequest)
        addresses = [str(address) for address in await self._p2p.get_visible_maddrs()]
        return {"peer": self._p2p.peer_id.to_base58(), "addresses": addresses}

    async def meet(self, other: Message) -> Message:
        self._other = PeerID.from_base58(other["peer"])
        addresses = [Multiaddr(address.split("/p2p/")[0]) for address in other["addresses"]]
        await self._p2p._client.connect(self._other, addresses)
        _, self._reader, self._writer = await self._p2p.call_binary_stream_handler(self._other, "binary")
        _, *self._small = await self._p2p.call_binary_stream_handler(self._other, "small")
        return {}

    async def send(self, method: str, messages: int, in_flight: int) -> Message:
        return {"seconds": await self._send(method, messages, in_flight)}

    async def small(self, method: str, messages: int, in_flight: int, times: int) -> Message:
        """Round trips of small messages, on a stream of their own, without and with bulk beside them."""
        idle = await round_trip(self._ping, times)
        busy, seconds, count = await round_trip_during(self._send(method, messages, in_flight), self._ping)
        return {"idle": idle, "busy": busy, "count": count, "seconds": seconds}

    async def sent_checksum(self) -> Message:
        return {"checksum": checksum(bytes_of(self._activations))}

    async def received_checksum(self) -> Message:
        got = self._received
        return {"checksum": checksum(bytes_of(got) if isinstance(got, torch.Tensor) else got)}

    async def stop(self) -> None:
        await self._p2p.shutdown()

    async def _send(self, method: str, messages: int, in_flight: int) -> float:
        if method == "binary_stream":
            self._turns = asyncio.Lock()
            self._waiting: deque[asyncio.Future[None]] = deque()
            replies = asyncio.ensure_future(self._read_acknowledgements(messages))
            seconds = await keep_in_flight(self._send_binary, messages, in_flight)
            await replies
            return seconds
        send = {"protobuf_stream": self._send_parts, "unary": self._send_unary}[method]
        return await keep_in_flight(send, messages, in_flight)

    # --- the bare stream

    async def _send_binary(self) -> None:
        async with self._turns:
            answered = asyncio.get_running_loop().create_future()
            self._waiting.append(answered)
            await P2P.send_raw_data(bytes_of(self._activations), self._writer)
        await answered

    async def _read_acknowledgements(self, messages: int) -> None:
        for _ in range(messages):
            await self._reader.readexactly(len(ACKNOWLEDGEMENT))
            self._waiting.popleft().set_result(None)

    async def _on_binary(
        self, info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            self._received = await P2P.receive_raw_data(reader)
            writer.write(ACKNOWLEDGEMENT)

    async def _ping(self) -> None:
        reader, writer = self._small
        writer.write(bytes(SMALL_BYTES))
        await reader.readexactly(SMALL_BYTES)

    async def _on_small(
        self, info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            writer.write(await reader.readexactly(SMALL_BYTES))

    # --- protobuf

    async def _send_parts(self) -> None:
        tensor = serialize_torch_tensor(self._activations)

        async def parts() -> AsyncIterator[runtime_pb2.ExpertRequest]:
            for part in split_for_streaming(tensor, DEFAULT_MAX_MSG_SIZE):
                yield runtime_pb2.ExpertRequest(uid="1", tensors=[part])

        for _ in range(TRIES):
            with suppress(ValueError):  # rarely hivemind ends the stream without its answer
                await self._p2p.call_protobuf_handler(
                    self._other, "stream", parts(), runtime_pb2.ExpertResponse
                )
                return
            print("hivemind left a protobuf stream without an answer: sending it again", file=sys.stderr)
        raise ConnectionError(f"hivemind left a protobuf stream without an answer {TRIES} times")

    async def _on_parts(self, requests: Any, context: object) -> runtime_pb2.ExpertResponse:
        parts = [request.tensors[0] async for request in requests]
        self._received = deserialize_torch_tensor(combine_from_streaming(parts))
        return runtime_pb2.ExpertResponse()

    async def _send_unary(self) -> None:
        tensor = serialize_torch_tensor(self._activations)
        parts = list(split_for_streaming(tensor, DEFAULT_MAX_MSG_SIZE - HEADROOM))
        message = next(self._numbers)
        requests = (
            runtime_pb2.ExpertRequest(uid=f"{message} {number} {len(parts)}", tensors=[part])
            for number, part in enumerate(parts)
        )
        await asyncio.gather(
            *(
                self._p2p.call_protobuf_handler(self._other, "unary", request, runtime_pb2.ExpertResponse)
                for request in requests
            )
        )

    async def _on_unary(
        self, request: runtime_pb2.ExpertRequest, context: object
    ) -> runtime_pb2.ExpertResponse:
        message, number, count = map(int, request.uid.split())
        parts = self._incomplete.setdefault(message, {})
        parts[number] = request.tensors[0]
        if len(parts) == count:
            del self._incomplete[message]
            whole = combine_from_streaming(parts[number] for number in range(count))
            self._received = deserialize_torch_tensor(whole)
        return runtime_pb2.ExpertResponse()


if __name__ == "__main__":
    uvloop.run(serve_commands(HivemindHop(json.loads(sys.argv[1]))))
