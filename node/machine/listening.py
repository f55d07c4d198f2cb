"""Places where a program on this machine listens, as people write them: HOST:PORT."""

from __future__ import annotations

import ipaddress
import re
import socket

from protocol.errors import UserError
from protocol.transport.ports import refused

HERE = "127.0.0.1"
OPEN_TO_ALL = (
    "Anybody who reaches this machine at that port can read it and, beside a node, ask the run for texts; nobody can "
    "change anything by it."
)


def parse_listen(text: str) -> tuple[str, int]:
    """("127.0.0.1", 8080) of "127.0.0.1:8080", of ":8080" and of "8080"; IPv6 as "[::1]:80". Raises `ValueError`."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]:|([^\s:\[\]/]*):)?([0-9]{1,5})", text.strip())
    if found is None or int(found[3]) > 65_535:
        raise ValueError(f"{text!r} is not HOST:PORT: write it as {HERE}:8080, or 0.0.0.0:8080 for everybody")
    return found[1] or found[2] or HERE, int(found[3])


def require_place(text: str, flag: str) -> tuple[str, int]:
    """Parse as `parse_listen` does; raises `UserError` that names `flag`. An empty text, for nowhere, is ("", 0)."""
    try:
        return parse_listen(text) if text else ("", 0)
    except ValueError as problem:
        raise UserError(f"{flag}: {problem}.") from None


def is_for_this_machine_alone(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises `ResourceError` that names `flag`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise refused(error, host, port, flag, flag) from None


def address_of(listening: socket.socket) -> str:
    """http://HOST:PORT/ as a browser on this machine takes it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": HERE, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
