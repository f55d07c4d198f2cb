"""TCP ports: which one this node had, and whether it can have it again."""

from __future__ import annotations

import socket

from protocol.errors import ResourceError


def port_is_free(host: str, port: int) -> bool:
    """Whether a program could listen on `port` of the address `host` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_port(host: str, port: int) -> None:
    """Raises `ResourceError` unless a program could listen on `port`; 0 is whichever is free."""
    if port and not port_is_free(host, port):
        raise ResourceError(
            f"Port {port} is in use on {host}. Stop the program that has it, or choose another --port."
        )


def tcp_port(addresses: list[str]) -> int:
    """The first TCP port in a list of multiaddresses; 0 when there is none."""
    for address in addresses:
        parts = address.split("/")
        if "tcp" in parts[:-1]:
            return int(parts[parts.index("tcp") + 1])
    return 0
