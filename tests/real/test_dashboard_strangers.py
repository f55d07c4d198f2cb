"""The dashboard against pages of strangers, and against whoever opens connections and asks for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from bootstrap.dashboard.connections import HEAD_SECONDS, MOST_CONNECTIONS
from tests.patience import patience
from tests.real.test_dashboard import dashboard

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATHS = ("/", "/page.js", "/state", "/live", "/picture?time=0", "/links", "/metrics", "/healthz", "/nothing")


@asynccontextmanager
async def connection(port: int, sent: bytes = b"") -> AsyncIterator[Ends]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(path: str, host: str | None, more: str = "Connection: close\r\n") -> bytes:
    named = "" if host is None else f"Host: {host}\r\n"
    version = "1.0" if host is None else "1.1"
    return f"GET {path} HTTP/{version}\r\n{named}{more}\r\n".encode()


async def first_line(port: int, request: bytes) -> bytes:
    async with connection(port, request) as (reader, _), asyncio.timeout(patience(20)):
        return (await reader.readline()).strip()


def port_of(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", None])
async def test_no_path_answers_a_name_that_anybody_can_point_here(host: str | None) -> None:
    async with dashboard() as (_, address, _leaving):
        port = port_of(address)
        assert {path: await first_line(port, head(path, host)) for path in PATHS} == dict.fromkeys(
            PATHS, b"HTTP/1.1 421 Misdirected Request"
        )
        for own in ("127.0.0.1", f"localhost:{port}", "[::1]:1"):
            assert await first_line(port, head("/state", own)) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    "sent", [b"", b"GET /sta", head("/healthz", "127.0.0.1", ""), b"POST / HTTP/1.1\r\n"]
)
async def test_idle_connections_give_way_to_new_ones(sent: bytes) -> None:
    """Ones with half a request, and ones that were answered and stay."""
    async with dashboard() as (_, address, _leaving), AsyncExitStack() as opened:
        port = port_of(address)
        for _ in range(MOST_CONNECTIONS + 20):
            await opened.enter_async_context(connection(port, sent))
        for path in ("/healthz", "/metrics", "/state"):
            assert await first_line(port, head(path, "127.0.0.1")) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("begun", [b"", head("/healthz", "127.0.0.1", "")], ids=["first", "second"])
async def test_a_head_that_trickles_in_ends_the_connection(begun: bytes) -> None:
    """Each byte that comes does not begin the wait anew, also not after an answer."""
    async with dashboard() as (_, address, _leaving):
        loop = asyncio.get_running_loop()
        async with connection(port_of(address), begun) as (reader, writer):
            began = loop.time()

            async def trickle() -> None:
                writer.write(b"GET /")
                while True:
                    await asyncio.sleep(0.2)
                    writer.write(b"x")

            trickling = asyncio.create_task(trickle())
            async with asyncio.timeout(patience(HEAD_SECONDS + 10)):
                try:
                    while await reader.read(65_536):
                        pass
                except ConnectionError:
                    pass
            trickling.cancel()
            assert loop.time() - began >= HEAD_SECONDS - 1


async def test_a_stream_is_not_idle() -> None:
    """It lives for longer than a head may take, and gives way to nobody."""
    async with dashboard() as (_, address, _leaving), AsyncExitStack() as opened:
        port = port_of(address)
        reader, _ = await opened.enter_async_context(connection(port, head("/live", "127.0.0.1", "")))
        for _ in range(MOST_CONNECTIONS + 5):
            await opened.enter_async_context(connection(port, b"GET /sta"))
        loop = asyncio.get_running_loop()
        ends = loop.time() + HEAD_SECONDS + 6
        async with asyncio.timeout(patience(HEAD_SECONDS + 25)):
            while loop.time() < ends:
                assert await reader.readline()
