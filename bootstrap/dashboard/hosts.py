"""The names by which browsers may ask for the page.

A stranger's page can point its own name at 127.0.0.1 after it was loaded (DNS rebinding). The browser then takes the
dashboard for that page's own server and lets its scripts read everything. Only the Host header tells the two apart.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from node.machine.listening import is_for_this_machine_alone

MISDIRECTED = 421  # RFC 9110, section 15.5.20
HERE = frozenset({"localhost", "127.0.0.1", "::1"})
REFUSAL = (
    "This page does not answer by that name. Ask for it by its address, http://127.0.0.1:PORT/ or the machine's, "
    "or by the name that its --listen or --dashboard has."
)


def host_in(header: str) -> str:
    """Return the host of a Host header or of HOST:PORT in lower case, without brackets; empty if there is none."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?", header.strip())
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def names_of_this_machine() -> frozenset[str]:
    """Return the machine's name, its first label, and both as mDNS has them. Asks no resolver."""
    name = socket.gethostname().lower()
    first = name.partition(".")[0]
    return frozenset({name, first, f"{name}.local", f"{first}.local"})


class AllowedHosts:
    """The hosts that a Host header may name for a server that listens at one place.

    The port does not matter: a tunnel changes it, and it is the name that a stranger's page cannot choose.
    At loopback these are the names of loopback; elsewhere also any address, as no name can be pointed at one, and the
    names of this machine. The host that the person who started the server has named is always one.
    """

    def __init__(self, listening_host: str, named: str = "", own: Iterable[str] | None = None) -> None:
        """`named` is HOST:PORT as `--listen` or `--dashboard` has it; `own` are this machine's names."""
        self._is_open = not is_for_this_machine_alone(listening_host)
        more = (names_of_this_machine() if own is None else own) if self._is_open else ()
        self._names = HERE | {listening_host, host_in(named)} | set(more)

    def allows(self, header: str | None) -> bool:
        """Whether a request with this Host header is answered; one without it is not."""
        host = host_in(header or "")
        return bool(host) and (host in self._names or (self._is_open and _is_address(host)))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class OnlyTheseHosts:
    """Refuses requests for other hosts with 421, whatever their path."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(headers) == 1 and self._hosts.allows(headers[0]):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse(REFUSAL, MISDIRECTED)(scope, receive, send)
