"""One end of a link: opens streams to the other and has a byte sent back on each, or sends it back."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import uvloop
from averaging.coordination import Message as Command
from hops.serving import serve_commands

from protocol.records.identity import Identity
from protocol.transport.base import Stream
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

ECHO = "/noloco/benchmark/echo"
DEADLINE = 60.0


class StreamOpener:
    """Mutable state: the transport and the other end's peer id."""

    def __init__(self, settings: Command) -> None:
        self._host: str = settings["host"]
        self._folder = tempfile.TemporaryDirectory()

    async def start(self) -> Command:
        identity = Path(self._folder.name, "identity")
        Identity.generate().save(identity)
        self._transport = Libp2pTransport(identity, Libp2pConfig(host=self._host))
        await self._transport.start()
        await self._transport.serve(ECHO, _echo)
        return {"peer": self._transport.peer_id, "addresses": self._transport.addresses()}

    async def meet(self, other: Command) -> Command:
        self._other = other["peer"]
        await self._transport.connect(other["addresses"], DEADLINE)
        (await self._transport.open(self._other, ECHO, DEADLINE)).close()  # the first asks what is served
        return {}

    async def ask(self, times: int) -> Command:
        """Median seconds until a byte is back: on a stream that was waited for, one opened ahead, and an open one."""
        taken: dict[str, list[float]] = {"waited": [], "ahead": [], "open": []}
        for number in range(2 * times):
            ahead = number % 2 == 1
            began = time.perf_counter()
            stream = await self._transport.open(self._other, ECHO, DEADLINE, ahead=ahead)
            for name in ("ahead" if ahead else "waited", "open"):
                await stream.write(b"?")
                await stream.read(1)
                taken[name].append(time.perf_counter() - began)
                began = time.perf_counter()
            stream.close()
        return {name: median(seconds) for name, seconds in taken.items()}

    async def stop(self) -> None:
        await self._transport.close()
        self._folder.cleanup()


async def _echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1))


if __name__ == "__main__":
    uvloop.run(serve_commands(StreamOpener(json.loads(sys.argv[1]))))
