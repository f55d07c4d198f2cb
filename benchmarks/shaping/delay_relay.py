"""A switch that passes every frame on after a fixed time: what lies between the links of `links.py`.

Never earlier, and up to two of its turns later.

    python delay_relay.py --delay 0.05 wan1 wan2 …

Runs until it or its parent is killed, in the network namespace of the named interfaces. It reads whole segments of
up to 64 KiB as the sender's TCP made them (virtio-net headers carry what the network card would have to do), so
that Python keeps up: at 8 × 100 Mbit/s there are about 20,000 frames a second and not 140,000.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER = 32 << 20  # frames that arrive while this process does not run must not be lost
_LARGEST_FRAME = 70_000  # a segment of 64 KiB with its headers
_VNET_HEADER = 10  # bytes that stand before the Ethernet header
_LEAST_TURN = (
    0.001  # seconds between two looks at the interfaces: waking up for each frame takes a whole core
)
_TURN_SHARE = 0.02  # of the delay: what this process computes is taken from the peers that share the machine
_LONGEST_WAIT = 1.0  # seconds until it is noticed that the parent has died

Mac = bytes


class DelayRelay:
    """Mutable state: frames under way, oldest first, and behind which interface each station was seen."""

    def __init__(self, ports: list[socket.socket], delay: float) -> None:
        self._ports = {port.fileno(): port for port in ports}
        self._delay = delay
        self._turn = max(_LEAST_TURN, _TURN_SHARE * delay)
        # due, from, with virtio-net header
        self._under_way: deque[tuple[float, socket.socket, bytes]] = deque()
        self._stations: dict[Mac, socket.socket] = {}
        self.lost = 0  # the link's queue was full, as in a router

    def run(self) -> None:
        poll, parent = select.epoll(), os.getppid()
        for number in self._ports:
            poll.register(number, select.EPOLLIN)
        while os.getppid() == parent:
            if self._under_way:
                time.sleep(self._turn)
            waiting = poll.poll(0 if self._under_way else _LONGEST_WAIT)
            now = time.monotonic()
            for number, _ in waiting:
                self._take(self._ports[number], now + self._delay)
            self._deliver(now)

    def _take(self, port: socket.socket, due: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = port.recv(_LARGEST_FRAME)
                self._stations[data[_VNET_HEADER + 6 : _VNET_HEADER + 12]] = port
                self._under_way.append((due, port, data))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, source, data = self._under_way.popleft()
            destination = self._stations.get(data[_VNET_HEADER : _VNET_HEADER + 6])
            for target in [destination] if destination is not None else self._ports.values():
                if target is not source:
                    self._send(target, data)

    def _send(self, target: socket.socket, data: bytes) -> None:
        try:
            target.send(data)
        except OSError:
            self.lost += 1


def open_port(interface: str) -> socket.socket:
    """All frames that arrive at `interface`, and a way to send some out of it. Needs CAP_NET_RAW."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
    port.setblocking(False)
    port.bind((interface, _ETH_P_ALL))
    return port


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, required=True, help="seconds one way")
    parser.add_argument("interfaces", nargs="+")
    arguments = parser.parse_args()
    relay = DelayRelay([open_port(name) for name in arguments.interfaces], arguments.delay)
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        relay.run()
    print(f"lost {relay.lost}", file=sys.stderr)


if __name__ == "__main__":
    main()
