"""A switch whose links are as narrow and as long as it is told: what lies between the peers of `links.py`.

    python link_relay.py wan1 wan2 …

Runs in the network namespace of the named interfaces, one for each peer. A line on its standard input says how the
links are from then on: megabits per second up and down (inf: no limit), and seconds one way. It ends with its input.

A frame goes through its sender's link, takes its time on the way, and goes through its receiver's link; on each link
it waits for those before it, as in a router, and is lost where that takes too long. None is earlier than on such
links, and each is up to three of this process's turns later.

It reads whole segments of up to 64 KiB as the sender's TCP made them (virtio-net headers carry what the network card
would have to do), and keeps them whole, but counts the headers of the packets that they would be. tbf in the kernel
would cut them, and what that costs, some thousand timers and wake-ups a second, is taken from the peers, which
compute on the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import math
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER = 32 << 20  # frames that arrive while this process does not run must not be lost
_LARGEST_FRAME = 70_000  # a segment of 64 KiB with its headers
# flags, kind of segment, length of headers, payload of each of its packets, place of the checksum (two fields)
_VNET_HEADER = struct.Struct("=BBHHHH")
_HEADERS = 66  # of Ethernet, IPv4 and TCP with timestamps
# seconds between two looks at the interfaces: waking up for each frame would take a whole core
_LEAST_TURN = 0.001
_TURN_SHARE = 0.02  # of the delay
_QUEUE_SECONDS = 0.1  # how long frames may wait in front of a narrow link before they are lost
_INPUT = 0

Mac = bytes


@dataclass
class Direction:
    """One way of a link. Mutable state: when it will have passed all that it was given."""

    idle_from: float = 0.0

    def passed(self, nbytes: int, arrives: float, bytes_per_second: float) -> float | None:
        """When the last of so many bytes is through; None when they are lost, for the queue is full."""
        begins = max(arrives, self.idle_from)
        if begins - arrives > _QUEUE_SECONDS:
            return None
        self.idle_from = begins + nbytes / bytes_per_second
        return self.idle_from


@dataclass
class Link:
    """Between a peer and the middle."""

    port: socket.socket
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)


@dataclass(frozen=True)
class Frame:
    """As it was read, and whose link it is on."""

    source: Link
    data: bytes  # behind a virtio-net header
    target: Link | None = None  # once it is in that one's link

    @property
    def receiver(self) -> Mac:
        return self.data[_VNET_HEADER.size : _VNET_HEADER.size + 6]

    @property
    def sender(self) -> Mac:
        return self.data[_VNET_HEADER.size + 6 : _VNET_HEADER.size + 12]

    @property
    def nbytes(self) -> int:
        """On the wire, where each packet of a segment has headers of its own."""
        _, kind, _, payload, _, _ = _VNET_HEADER.unpack_from(self.data)
        whole = len(self.data) - _VNET_HEADER.size
        packets = math.ceil((whole - _HEADERS) / payload) if kind and payload else 1
        return whole + (packets - 1) * _HEADERS


class LinkRelay:
    """Mutable state: frames under way by the time of their next event, and in whose link each station was seen."""

    def __init__(self, ports: list[socket.socket]) -> None:
        self._links = {port.fileno(): Link(port) for port in ports}
        self._up = self._down = math.inf  # bytes per second
        self._delay, self._turn = 0.0, _LEAST_TURN
        self._under_way: list[tuple[float, int, Frame]] = []
        self._numbers = itertools.count()  # frames of the same time keep their order
        self._stations: dict[Mac, Link] = {}

    def run(self) -> None:
        poll = select.epoll()
        for number in (_INPUT, *self._links):
            poll.register(number, select.EPOLLIN)
        while True:
            if self._under_way:
                time.sleep(self._turn)
            waiting = poll.poll(0 if self._under_way else None)
            now = time.monotonic()
            for number, _ in waiting:
                if number != _INPUT:
                    self._take(self._links[number], now)
                elif not self._reshape(os.read(_INPUT, 4096).decode()):
                    return
            self._deliver(now)

    def _reshape(self, told: str) -> bool:
        """False at the end of the input. What is under way is not affected."""
        if not told:
            return False
        up, down, delay = map(float, told.splitlines()[-1].split())
        self._up, self._down, self._delay = up * 1e6 / 8, down * 1e6 / 8, delay
        self._turn = max(_LEAST_TURN, _TURN_SHARE * delay)
        return True

    def _take(self, link: Link, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = Frame(link, link.port.recv(_LARGEST_FRAME))
                self._stations[frame.sender] = link
                self._pass(frame, link.up.passed(frame.nbytes, now, self._up), self._delay)

    def _pass(self, frame: Frame, passed: float | None, then: float) -> None:
        """Note when a frame is through one direction of a link; its next event is `then` seconds after that."""
        if passed is not None:
            heapq.heappush(self._under_way, (passed + then, next(self._numbers), frame))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            due, _, frame = heapq.heappop(self._under_way)
            if frame.target is not None:
                with contextlib.suppress(OSError):  # the receiver's own queue is full: lost
                    frame.target.port.send(frame.data)
                continue
            known = self._stations.get(frame.receiver)
            for link in [known] if known is not None else self._links.values():
                if link is not frame.source:
                    passed = link.down.passed(frame.nbytes, due, self._down)
                    self._pass(Frame(frame.source, frame.data, link), passed, 0.0)


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
    parser.add_argument("interfaces", nargs="+")
    arguments = parser.parse_args()
    relay = LinkRelay([open_port(name) for name in arguments.interfaces])
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        relay.run()


if __name__ == "__main__":
    main()
