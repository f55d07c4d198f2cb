"""A network of some transport, as tests of transports use it, and what its peers do in them.

Each test is a coroutine that gets a `Network`; `on_network` turns it into a plain function that pytest calls.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from protocol.transport.base import Stream, Transport
from tests.patience import patience

ECHO = "/noloco/test/echo"
KEY = "noloco/test/records"
DEADLINE = patience(60.0)  # seconds that the product is given; no test here is about its end
PATIENCE = patience(120.0)  # seconds in which what must happen happens, however busy the machine is


class Network(abc.ABC):
    """Peers that can be killed and frozen.

    `at_once` is how many seconds pass where something is to be noticed at once: under the virtual clock they are
    those of the model, in real time any that a busy machine takes.
    """

    at_once: float

    @abc.abstractmethod
    async def peer(self, name: str) -> Transport:
        """A started transport whose identity follows from `name`; closed at the end of the test."""

    @abc.abstractmethod
    def kill(self, transport: Transport) -> None: ...

    @abc.abstractmethod
    def freeze(self, transport: Transport) -> None: ...

    @abc.abstractmethod
    def thaw(self, transport: Transport) -> None: ...

    @abc.abstractmethod
    async def inject(
        self, through: Transport, digest: bytes, subkey: str, sealed: bytes, expires: float
    ) -> bool:
        """Try to store any bytes as a record, past the checks of `put`; whether some peer took them."""

    async def peers(self, names: str) -> list[Transport]:
        """One peer for each letter."""
        return list(await asyncio.gather(*map(self.peer, names)))

    async def pair(self) -> tuple[Transport, Transport]:
        """Two peers that know each other; the second one serves `ECHO`."""
        a, b = await self.peers("ab")
        await b.serve(ECHO, echo)
        assert await a.connect(b.addresses(), DEADLINE) == [b.peer_id]
        return a, b


async def echo(stream: Stream) -> None:
    """Send back what comes: eight bytes of length, then that much."""
    while True:
        size = int.from_bytes(await stream.read(8), "big")
        await stream.write(size.to_bytes(8, "big"), await stream.read(size))


async def ask(stream: Stream, data: bytes) -> bytes:
    await stream.write(len(data).to_bytes(8, "big"), data)
    return await stream.read(int.from_bytes(await stream.read(8), "big"))


async def eventually(condition: Callable[[], Awaitable[object]], within: float = PATIENCE) -> None:
    """Until `condition` holds; asks it 50 times a second."""
    async with asyncio.timeout(within):
        while not await condition():  # noqa: ASYNC110 - what happens in another process sets no event here
            await asyncio.sleep(0.02)


async def keep_writing(stream: Stream) -> None:
    while True:
        await stream.write(b"x")
        await asyncio.sleep(0.01)


Suite = TypeVar("Suite", bound="OnNetwork")


def on_network(
    test: Callable[[Suite, Network], Coroutine[Any, Any, None]],
) -> Callable[[Suite, Path], None]:
    def run(self: Suite, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.network(tmp_path) as network:
                await test(self, network)

        self.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class OnNetwork(abc.ABC):
    """Tests of a transport that leave open what the network is and which event loop runs it."""

    @abc.abstractmethod
    def run(self, main: Coroutine[Any, Any, None]) -> None: ...

    @abc.abstractmethod
    def network(self, folder: Path) -> AbstractAsyncContextManager[Network]: ...
