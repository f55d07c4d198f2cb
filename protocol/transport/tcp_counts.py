"""Bytes that a process has sent and received over TCP, as Linux counts them: sock_diag(7), struct tcp_info.

Elsewhere, and where that is forbidden, nothing is known.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 20 with timestamps 12
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_INFO = 2  # INET_DIAG_INFO
_MESSAGE = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, number, port
_REQUEST = struct.Struct("=BBBBI48s")  # inet_diag_req_v2: family, protocol, extensions, pad, states, socket
_ALL_STATES = 0xFFF
_FIXED = 72  # bytes of inet_diag_msg; its last four are the inode
_RECEIVED, _SEGMENTS, _SENT = (
    128,
    136,
    200,
)  # offsets in tcp_info: bytes_received, segs_out and segs_in, bytes_sent
_AT_ONCE = 1 << 16


class TcpCounts:
    """Counts what the TCP connections of one process move. Mutable state: what each had moved when it was last
    seen.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: dict[int, tuple[int, int]] = {}

    def since_last(self) -> tuple[int, int] | None:
        """Bytes sent and received since the last call, by an interface's count; None where the kernel does not tell.

        What a connection moved between the last look and its end is not seen.
        """
        try:
            now = _by_inode(_inodes(self._pid))
        except OSError:
            return None
        sent = received = 0
        for inode, (out, came) in now.items():
            out_before, came_before = self._last.get(inode, (0, 0))
            sent, received = sent + max(0, out - out_before), received + max(0, came - came_before)
        self._last = now
        return sent, received


def _inodes(pid: int) -> set[int]:
    """Inodes of the sockets that the process has open."""
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = str(Path(entry.path).readlink())
        except OSError:  # closed meanwhile
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            found.add(int(match[1]))
    return found


def _by_inode(wanted: set[int]) -> dict[int, tuple[int, int]]:
    """Bytes sent and received, with headers, of each of these sockets that is a TCP connection."""
    if sys.platform != "linux":
        raise OSError("only Linux tells")
    counts = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for inode, attributes in _connections(family):
            if inode not in wanted:
                continue  # a machine may have thousands of others
            info = dict(_attributes(attributes)).get(_INFO, b"")
            if len(info) >= _SENT + 8:
                (came,), (sent,) = (
                    struct.unpack_from("=Q", info, _RECEIVED),
                    struct.unpack_from("=Q", info, _SENT),
                )
                segments_out, segments_in = struct.unpack_from("=II", info, _SEGMENTS)
                counts[inode] = (sent + HEADER_BYTES * segments_out, came + HEADER_BYTES * segments_in)
    return counts


def _connections(family: int) -> Iterator[tuple[int, bytes]]:
    """The inode and attributes of each TCP socket of this network namespace. Raises `OSError`."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ALL_STATES, bytes(48))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(body), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + body)
        while True:
            for kind, payload in _messages(kernel.recv(_AT_ONCE)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel refuses to tell")
                yield int.from_bytes(payload[_FIXED - 4 : _FIXED], sys.byteorder), payload[_FIXED:]


def _messages(packet: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and payload of each, netlink(7)."""
    start = 0
    while start + _MESSAGE.size <= len(packet):
        length, kind, *_ = _MESSAGE.unpack_from(packet, start)
        yield kind, packet[start + _MESSAGE.size : start + length]
        start += _aligned(max(length, _MESSAGE.size))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and payload of each attribute, rtnetlink(3)."""
    start = 0
    while start + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, start)
        yield kind, data[start + 4 : start + length]
        start += _aligned(max(length, 4))


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
