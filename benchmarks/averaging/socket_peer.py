"""The same bytes both ways over one bare asyncio socket on uvloop: no encryption, no averaging, no second process."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time

import uvloop
from coordination import Message, next_command, say, sleep_until

PIECE = 1 << 20


class SocketPeer:
    """Mutable state: the one connection to the other peer."""

    def __init__(self, settings: Message) -> None:
        self._host: str = settings["host"]
        self._bytes = bytes(sum(math.prod(shape) for shape in settings["shapes"]) * 4)
        self._connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]

    async def start(self) -> Message:
        self._connected = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connected.set_result((reader, writer))

        self._server = await asyncio.start_server(accept, self._host, 0, limit=PIECE)
        return {"port": self._server.sockets[0].getsockname()[1], "host": self._host}

    async def meet(self, others: list[Message]) -> Message:
        mine, (first, _) = self._server.sockets[0].getsockname()[1], others
        if first["port"] != mine:
            self._connected.set_result(
                await asyncio.open_connection(first["host"], first["port"], limit=PIECE)
            )
        return {}

    async def prepare_average(self) -> Message:
        await self._connected
        return {}

    async def average(self, at: float) -> Message:
        reader, writer = await self._connected
        sleep_until(at)
        await asyncio.gather(self._send(writer), self._receive(reader))
        return {"seconds": time.monotonic() - at}

    async def rest(self) -> Message:
        return {}

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        view = memoryview(self._bytes)
        for start in range(0, len(view), PIECE):
            writer.write(view[start : start + PIECE])
            await writer.drain()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        missing = len(self._bytes)
        while missing:
            missing -= len(await reader.readexactly(min(PIECE, missing)))


async def main(settings: Message) -> None:
    peer = SocketPeer(settings)
    say(await peer.start())
    loop = asyncio.get_running_loop()
    while (command := await loop.run_in_executor(None, next_command)) is not None:
        say(await getattr(peer, command.pop("command"))(**command))


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
