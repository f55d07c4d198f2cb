"""One end of a hop as the daemon makes it: torch tensor, `encode`, `Rpc.call`, and a handler that decodes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import uvloop
from averaging.coordination import Message as Command
from hops.activations import (
    NBYTES,
    bytes_of,
    checksum,
    keep_in_flight,
    make_activations,
    round_trip,
    round_trip_during,
)
from hops.serving import serve_commands

from node.machine.limits import keep_freed_memory
from protocol.codecs.codec import encode
from protocol.messages import Asks, Done, Message
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

DEADLINE = 60.0


class Parcel(Asks[Done], kind="forward", traffic=Traffic.PIPELINE):
    """Tensor: activations, as of `Forward`, with fields as long as its."""

    microbatch: str = "m"
    stage: int = 1


class Pong(Message, kind="ready"):
    pair: str


class Ping(Asks[Pong], kind="ready", traffic=Traffic.CONTROL):
    pair: str


SMALL = "x" * 28  # with a frame's prefix and header 64 bytes, as long as its number takes three


class NolocoHop:
    """Mutable state: transport and rpc, the other end's peer id, the tensor received last."""

    def __init__(self, settings: Command) -> None:
        self._host: str = settings["host"]
        self._folder = tempfile.TemporaryDirectory()
        self._activations = make_activations()
        self._received = torch.empty(0)

    async def start(self) -> Command:
        keep_freed_memory()  # as the daemon does
        torch.set_num_threads(1)
        identity = Path(self._folder.name, "identity")
        Identity.generate().save(identity)
        self._transport = Libp2pTransport(identity, Libp2pConfig(host=self._host))
        self._rpc = Rpc(self._transport, {Traffic.PIPELINE: NBYTES + 64 * 1024})
        self._rpc.handle(Parcel.answered_by(self._on_parcel))
        self._rpc.handle(Ping.answered_by(self._on_ping))
        await self._transport.start()
        await self._rpc.start()
        return {"peer": self._transport.peer_id, "addresses": self._transport.addresses()}

    async def meet(self, other: Command) -> Command:
        self._other = other["peer"]
        await self._transport.connect(other["addresses"], DEADLINE)
        return {}

    async def send(self, method: str, messages: int, in_flight: int) -> Command:
        return {"seconds": await keep_in_flight(self._send, messages, in_flight)}

    async def small(self, method: str, messages: int, in_flight: int, times: int) -> Command:
        """Round trips of small messages without and with bulk beside them."""
        idle = await round_trip(self._ping, times)
        bulk = keep_in_flight(self._send, messages, in_flight)
        busy, seconds, count = await round_trip_during(bulk, self._ping)
        return {"idle": idle, "busy": busy, "count": count, "seconds": seconds}

    async def sent_checksum(self) -> Command:
        return {"checksum": checksum(bytes_of(self._activations))}

    async def received_checksum(self) -> Command:
        return {"checksum": checksum(bytes_of(self._received))}

    async def stop(self) -> None:
        await self._rpc.close()
        await self._transport.close()
        self._folder.cleanup()

    async def _send(self) -> None:
        tensors = [encode(self._activations, "bf16")]
        await self._rpc.call(
            self._other,
            Parcel(),
            tensors,
            deadline=DEADLINE,
        )

    async def _ping(self) -> None:
        await self._rpc.call(self._other, Ping(pair=SMALL), deadline=DEADLINE)

    async def _on_parcel(self, request: Request[Parcel]) -> Answer[Done]:
        [self._received] = request.tensors()
        return Answer(Done())

    async def _on_ping(self, request: Request[Ping]) -> Answer[Pong]:
        return Answer(Pong(pair=SMALL))


if __name__ == "__main__":
    uvloop.run(serve_commands(NolocoHop(json.loads(sys.argv[1]))))
