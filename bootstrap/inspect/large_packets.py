"""Finds a way to a member that loses large packets without a word: small requests are answered, large ones are not.

Connections are made on such a way, and then stand still at the first message of more than a packet. What is sent is
libp2p's own first words: names of protocols that there are not, each of which is answered with a short no.
"""

from __future__ import annotations

import asyncio
import socket

from node.machine.checkup import CheckResult, Interface
from protocol.transport.libp2p_session import GREETING

NAME = (
    b"\xe9\x07/noloco/none/" + b"-" * 987 + b"\n"
)  # 1,001 bytes, which the first two count: 1,024 are libp2p's most
NO = b"\x03na\n"
NAMES = 10  # 10 kB: a jumbo frame
ANSWER_SECONDS = 3.0  # three or four tries of TCP, which doubles its patience with each
# bytes of packets that tunnels and lines are known to carry: Ethernet, PPPoE, WireGuard, GRE and LTE, IPv6's least
SIZES = (1492, 1420, 1360, 1280, 1000)
HEADERS = 40  # bytes of IPv4 and TCP, 20 more with IPv6


async def large_packets(host: str, port: int, near: Interface | None) -> CheckResult | None:
    """Judge the way to a member: None when it answers nothing at all, which is for the next check to say.

    Takes `ANSWER_SECONDS` where all is well or nothing is, as long again for each of `SIZES` otherwise.
    """
    if await answers(host, port, NAMES):
        return CheckResult("packets", True, "Large packets arrive, too.")
    if not await answers(host, port, 0):
        return None
    for most in SIZES:
        if await answers(host, port, NAMES, most):
            return lost_above(most, near)
    told = (
        "Small packets pass and large ones do not, of whatever size. Try another network, or without a VPN."
    )
    return CheckResult("packets", False, told)


def lost_above(most: int, near: Interface | None) -> CheckResult:
    """The finding for a way that carries packets of `most` bytes and none of the next larger size."""
    name, mtu = (near.name, near.mtu) if near is not None else ("INTERFACE", 1500)
    larger = min([size for size in SIZES if size > most] + [mtu])
    told = (
        f"Packets of {most} bytes arrive, larger ones ({larger}) are lost without a word: connections stall. "
        f"Lower the MTU: ip link set dev {name} mtu {most}; or the tunnel's or the router's, or clamp the MSS."
    )
    return CheckResult("packets", False, told)


async def answers(host: str, port: int, names: int, most: int = 0) -> bool:
    """Return whether so many names are answered within `ANSWER_SECONDS`, in packets of `most` bytes if any is given.

    What fails counts as no answer.
    """
    loop = asyncio.get_running_loop()
    expected = len(GREETING) + names * len(NO)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            [(family, *_, address), *_] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            with socket.socket(family, socket.SOCK_STREAM) as line:
                line.setblocking(False)
                if most:
                    headers = HEADERS + 20 * (family == socket.AF_INET6)
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, most - headers)
                await loop.sock_connect(line, address)
                await loop.sock_sendall(line, GREETING + names * NAME)
                received = b""
                while len(received) < expected:
                    if not (some := await loop.sock_recv(line, expected)):
                        return False
                    received += some
    except (OSError, TimeoutError):
        return False
    return received == GREETING + names * NO
