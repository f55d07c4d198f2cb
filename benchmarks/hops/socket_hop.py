"""One end of a hop over one bare asyncio connection on uvloop: no encryption, no p2pd, 8 bytes back each time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque

import uvloop
from averaging.coordination import Message
from hops.activations import NBYTES, bytes_of, checksum, keep_in_flight, make_activations
from hops.serving import serve_commands

PIECE = 1 << 20
ACKNOWLEDGEMENT = bytes(8)


class SocketHop:
    """Mutable state: the connection, who waits for an answer, the message received last."""

    def __init__(self, settings: Message) -> None:
        self._host: str = settings["host"]
        self._bytes = bytes_of(make_activations())
        self._received = bytearray(NBYTES)
        self._turns = asyncio.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def start(self) -> Message:
        self._server = await asyncio.start_server(self._on_connection, self._host, 0, limit=PIECE)
        return {"host": self._host, "port": self._server.sockets[0].getsockname()[1]}

    async def meet(self, other: Message) -> Message:
        self._reader, self._writer = await asyncio.open_connection(other["host"], other["port"])
        return {}

    async def send(self, method: str, messages: int, in_flight: int) -> Message:
        replies = asyncio.ensure_future(self._read_acknowledgements(messages))
        seconds = await keep_in_flight(self._send, messages, in_flight)
        await replies
        return {"seconds": seconds}

    async def sent_checksum(self) -> Message:
        return {"checksum": checksum(self._bytes)}

    async def received_checksum(self) -> Message:
        return {"checksum": checksum(self._received)}

    async def stop(self) -> None:
        self._server.close()

    async def _send(self) -> None:
        async with self._turns:
            answered = asyncio.get_running_loop().create_future()
            self._waiting.append(answered)
            for start in range(0, NBYTES, PIECE):
                self._writer.write(self._bytes[start : start + PIECE])
                await self._writer.drain()
        await answered

    async def _read_acknowledgements(self, messages: int) -> None:
        for _ in range(messages):
            await self._reader.readexactly(len(ACKNOWLEDGEMENT))
            self._waiting.popleft().set_result(None)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            for start in range(0, NBYTES, PIECE):
                try:
                    self._received[start : start + PIECE] = await reader.readexactly(PIECE)
                except asyncio.IncompleteReadError:
                    return
            writer.write(ACKNOWLEDGEMENT)


if __name__ == "__main__":
    uvloop.run(serve_commands(SocketHop(json.loads(sys.argv[1]))))
