"""A TCP connection begun from the port that p2pd listens on, and handed to p2pd once the other end has answered.

p2pd itself cannot begin it: both ends would then be TLS callers. Nor can a SYN be sent and forgotten, with p2pd's
listener to answer what comes: Linux's conntrack, which many home routers have, drops its SYN-ACK, whose number does
not go with the first SYN's. So the connection is held here; its bytes are copied to p2pd and back, still encrypted.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from protocol.records.addresses import Host, host_of
from protocol.supervision import all_of

ANSWERED = 6.0  # seconds: three SYNs of the kernel's, after 0, 1 and 3
STUCK = 60.0  # seconds in which an end takes nothing: p2pd has given the connection up by then
_COPIED = 1 << 18  # bytes at once
# bytes of a segment to and from p2pd: as many headers are counted there as go over the Internet, see `tcp_counts`
_SEGMENT = 1448


def begun(address: str, host: str, port: int) -> socket.socket:
    """Begin a connection to `address` from `host` and `port`, with its first SYN. Raises `OSError`.

    Where these ports had a connection a minute ago, it comes from another port.
    """
    there = host_of(address)
    if there is None:
        raise OSError(errno.EINVAL, f"{address} names no host")
    try:
        return _begun(there, int(address.split("/")[4]), host, port)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        return _begun(there, int(address.split("/")[4]), host, 0)


def _begun(there: Host, far_port: int, host: str, port: int) -> socket.socket:
    is_old = there.version == 4
    held = socket.socket(socket.AF_INET if is_old else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        held.setblocking(False)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        refused = held.connect_ex((str(there), far_port))
        if refused not in (0, errno.EINPROGRESS):
            raise OSError(refused, f"{there}, port {far_port}, cannot be sent to")
    except BaseException:
        held.close()
        raise
    return held


async def answered(held: socket.socket) -> bool:
    """Wait `ANSWERED` seconds at most for the other end; return whether the connection is there."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(held.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        async with asyncio.timeout(ANSWERED):
            await ready
    except TimeoutError:
        return False
    finally:
        loop.remove_writer(held.fileno())
    return held.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


@asynccontextmanager
async def handed_over(held: socket.socket, host: str, port: int) -> AsyncIterator[tuple[int, Copying]]:
    """Connect to p2pd, which listens there; gives the port that it takes the other end for, and what copies.

    Closes both connections. Raises `OSError`.
    """
    near = await asyncio.open_connection(sock=await _to_p2pd(host, port), limit=_COPIED)
    try:
        far = await asyncio.open_connection(sock=held, limit=_COPIED)
    except BaseException:
        near[1].close()
        raise
    try:
        yield near[1].get_extra_info("sockname")[1], Copying(near, far)
    finally:
        near[1].transport.abort()  # what was copied is in the kernel: what is not may never go
        far[1].transport.abort()


def p2pd_at(host: str) -> str:
    """Return the address at which this machine reaches a p2pd that listens on `host`, an IP address."""
    place = ipaddress.ip_address(host)
    if not place.is_unspecified:
        return host
    return "127.0.0.1" if place.version == 4 else "::1"


def multiaddress(host: str, port: int) -> str:
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


async def _to_p2pd(host: str, port: int) -> socket.socket:
    near = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        near.setblocking(False)
        with suppress(OSError):  # headers are counted too low then
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        await asyncio.get_running_loop().sock_connect(near, (host, port))
    except BaseException:
        near.close()
        raise
    return near


class Copying:
    """Copies bytes both ways between two connections."""

    def __init__(
        self,
        one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._one, self._other = one, other
        for _, writer in (one, other):
            writer.transport.set_write_buffer_limits(0)

    async def run(self) -> None:
        """Return once either end has closed or broken, or has taken nothing for `STUCK` seconds."""
        with suppress(OSError, EOFError):
            await all_of(
                self._copied(self._one[0], self._other[1]), self._copied(self._other[0], self._one[1])
            )

    async def _copied(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while some := await source.read(_COPIED):
            target.write(some)
            async with asyncio.timeout(STUCK):
                await target.drain()
        raise EOFError
