"""The socket to p2pd tells when bytes moved, also within one long write."""

from __future__ import annotations

import asyncio
import socket

from protocol.transport.p2pd_socket import P2pdSocket


async def connected() -> tuple[P2pdSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, protocol = await asyncio.get_running_loop().create_connection(P2pdSocket, sock=ours)
    return protocol, theirs


async def test_a_long_write_to_a_slow_reader_shows_that_it_moves() -> None:
    sender, reader = await connected()
    loop = asyncio.get_running_loop()
    sender.write(bytes(4 << 20))
    began = loop.time()
    writing = asyncio.ensure_future(sender.drain())
    await asyncio.sleep(0.5)
    assert sender.wrote - began < 0.3, "nobody read: what the kernel took at first is all that moved"
    for _ in range(3):
        before = loop.time()
        await loop.sock_recv(reader, 1 << 20)
        await asyncio.sleep(0.5)
        assert not writing.done()
        assert sender.wrote >= before
    assert loop.time() - sender.wrote < 0.6
    writing.cancel()
    sender.abort()
    reader.close()


async def test_a_write_that_the_kernel_takes_at_once_has_moved() -> None:
    sender, reader = await connected()
    sender.write(b"short")
    await sender.drain()
    assert asyncio.get_running_loop().time() - sender.wrote < 0.1
    sender.abort()
    reader.close()
