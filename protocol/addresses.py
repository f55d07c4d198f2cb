"""Addresses of peers as people type them: /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo…"""

from __future__ import annotations

import ipaddress
import re

from protocol.errors import RecordError, UserError
from protocol.identity import public_key_of
from protocol.transport.base import PeerId

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWEXAMPLE"

_HOST_KINDS = ("ip4", "ip6", "dns4", "dns6", "dns")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def check_address(text: str) -> str:
    """The address without surrounding white space. Raises `UserError`, saying what is wrong with it.

    Accepted is /<ip4|ip6|dns4|dns6|dns>/<host>/tcp/<port>/p2p/<peer id>.
    """
    address = text.strip()
    parts = address.split("/")
    if parts[0] or len(parts) != 7:
        raise _bad(address, "it does not have the form /ip4/HOST/tcp/PORT/p2p/PEER")
    _, host_kind, host, tcp, port, p2p, peer = parts
    _check_host(address, host_kind, host)
    if tcp != "tcp":
        raise _bad(address, f"peers listen on tcp, not on {tcp!r}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _bad(address, f"{port!r} is not a port between 1 and 65535")
    if p2p != "p2p":
        raise _bad(address, f"the peer id follows after /p2p/, not after /{p2p}/")
    try:
        public_key_of(peer)
    except RecordError as error:
        reason = f"{peer!r} is not a peer id; one begins with 12D3Koo and has 52 characters"
        raise _bad(address, reason) from error
    return address


def peer_id_in(address: str) -> PeerId:
    """The peer id at the end of an address. Raises `UserError` as `check_address` does."""
    return PeerId(check_address(address).rsplit("/", 1)[1])


def without_peer(address: str) -> str:
    """The address to dial, without the peer that is expected there."""
    return check_address(address).rsplit("/p2p/", 1)[0]


def is_loopback(address: str) -> bool:
    """Whether an address can be dialled from its own machine only."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    try:
        return kind in ("ip4", "ip6") and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_host(address: str, kind: str, host: str) -> None:
    if kind not in _HOST_KINDS:
        raise _bad(address, f"it begins with /{kind}/ instead of one of /" + "/, /".join(_HOST_KINDS) + "/")
    try:
        if kind == "ip4":
            ipaddress.IPv4Address(host)
        elif kind == "ip6":
            ipaddress.IPv6Address(host)
        elif len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.split(".")):
            raise ValueError(host)
    except ValueError as error:
        raise _bad(address, f"{host!r} is not an address of kind {kind}") from error


def _bad(address: str, reason: str) -> UserError:
    return UserError(f"Cannot use the address {address!r}: {reason}. A right one looks like {EXAMPLE}")
