"""Checks whether this machine can listen on an address and a port, and if not, for which of the reasons."""

from __future__ import annotations

import errno
import ipaddress
import socket

from protocol.errors import ResourceError, UserError, later
from protocol.records.addresses import Host

_FIRST_OF_EVERYBODY = 1_024


def require_port(host: str, port: int) -> Host:
    """The address that `host` is. Raises `UserError` unless a program could listen there now.

    That is a `ResourceError` when the port is in use or not this user's; 0 is whichever port is free.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise UserError(
            f"Cannot listen on {host!r}, not an IP address. Try --host 0.0.0.0, or :: for IPv6."
        ) from None
    if address.version == 6 and address.scope_id is not None:
        raise UserError(f"Cannot listen on {host}, which names an interface. Try --host :: for all of IPv6.")
    try:
        _try(address, port)
    except OSError as error:
        raise refused(error, host, port) from error
    return address


def port_is_free(host: str, port: int) -> bool:
    """Return whether a program could listen on `port` of the address `host` now."""
    try:
        require_port(host, port)
    except UserError:
        return False
    return True


def _try(address: Host, port: int) -> None:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the past do not count
        if address.version == 6:  # as p2pd does: IPv4 is another address
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((str(address), port))


def refused(error: OSError, host: str, port: int, *flags: str) -> ResourceError:
    """The error that says `why_not`; a port in use may be free again."""
    problem = ResourceError(why_not(error, host, port, *flags))
    return later(problem) if error.errno == errno.EADDRINUSE else problem


def why_not(
    error: OSError, host: str, port: int, host_flag: str = "--host", port_flag: str = "--port"
) -> str:
    """A sentence about a failure to listen, with what to do by the flags that chose the place."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use on {host}. Stop what uses it, or choose another {port_flag}."
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        everywhere = "::" if ":" in host else "0.0.0.0"
        mapped = (
            "; a router's, from which a port is mapped, is for --announce" if port_flag == "--port" else ""
        )
        return (
            f"This machine has no address {host}. Listen on one that it has, or on all of them with "
            f"{host_flag} {everywhere}{mapped}."
        )
    if error.errno in (errno.EACCES, errno.EPERM) and port < _FIRST_OF_EVERYBODY:
        return (
            f"Port {port} is not permitted to this user: those below {_FIRST_OF_EVERYBODY} are the system's. "
            f"Choose a higher {port_flag}."
        )
    return (
        f"Cannot listen on {host} port {port} ({error.strerror}). Choose another {port_flag} or {host_flag}."
    )
