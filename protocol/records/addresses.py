"""Addresses of peers as people type them, /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo…, and which of those that others
name are dialled.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from protocol.errors import RecordError, UserError
from protocol.ground import PeerId
from protocol.records.identity import public_key_of

SEED_PORT = 31337  # of a seed peer, unless its founder chose another
EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWEXAMPLE"

QUOTES = tuple("\"'`“”‘’")

Host: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 1918, RFC 6598 (carriers' own), RFC 4193: each leads somewhere else in every network
_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"))
)
_UNICAST_6 = ipaddress.ip_network("2000::/3")  # all that is assigned; NAT64 and the like lie outside of it
_6TO4 = ipaddress.ip_network("2002::/16")  # holds an IPv4 address, perhaps a private one
_FIRST_PORT = 1_024  # below are the machines' own services
_HOST_KINDS = ("ip4", "ip6", "dns4", "dns6", "dns")
_LONGEST_NAME = 253  # characters of a host's name: RFC 1035, 2.3.4
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")  # RFC 1123, 2.1; libp2p takes no others


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
    _check_port(address, tcp, port)
    if p2p != "p2p":
        raise _bad(address, f"the peer id follows after /p2p/, not after /{p2p}/")
    try:
        public_key_of(peer)
    except RecordError as error:
        reason = f"{peer!r} is not a peer id; one begins with 12D3Koo and has 52 characters"
        raise _bad(address, reason) from error
    return address


def seed_place(text: str) -> tuple[str, int]:
    """Return host and port of a seed peer from "HOST", "HOST:PORT" or "[IPv6]:PORT". Raises `UserError`."""
    try:
        parts = urlsplit(f"//{text.strip()}")
        host, port = parts.hostname, parts.port
        if not host or parts.netloc != text.strip() or "@" in text or port == 0 or len(host) > _LONGEST_NAME:
            raise ValueError
        host.encode("idna")  # as the resolver does, which raises for what can be no name
    except ValueError:
        raise UserError(
            f"--at: {text[:80]!r} is not HOST or HOST:PORT. Write it as 203.0.113.7, or 203.0.113.7:{SEED_PORT}."
        ) from None
    return host, port or SEED_PORT


def is_address(text: str) -> bool:
    """Return whether a peer can be dialled at an address that was kept, in a network in memory as well."""
    try:
        return text.startswith("/memory/") or bool(check_address(text))
    except UserError:
        return False


def check_announced(text: str, own: PeerId | None = None) -> str:
    """Check the address that others are to dial this peer at; return it with its own /p2p/ taken off.

    Its form is /<ip4|ip6|dns4|dns6|dns>/<host>/tcp/<port>. Raises `UserError` for all else; as long as the
    peer's `own` id is not known, any id passes.
    """
    address, _, peer = text.strip().partition("/p2p/")
    parts = address.split("/")
    if text.strip()[:1] in QUOTES or text.strip()[-1:] in QUOTES:
        raise _not_announced(text, "it has quotes around it: leave them out")
    if parts[0] or len(parts) != 5:
        raise _not_announced(text, _written_right(text))
    _, kind, host, tcp, port = parts
    try:
        _check_host(address, kind, host)
        _check_port(address, tcp, port)
        if peer:
            public_key_of(peer)
    except RecordError:
        raise _not_announced(text, f"{peer!r} is not a peer id; leave out /p2p/ and what follows") from None
    except UserError as problem:
        raise _not_announced(text, str(problem).partition(": ")[2].rpartition(". ")[0]) from None
    if (known := host_of(address)) is not None and (known.is_unspecified or known.is_multicast):
        raise _not_announced(text, f"nobody can dial {host}")
    if peer and own is not None and peer != own:
        raise _not_announced(
            text, f"it ends with another peer's id, and this peer is {own}: leave out /p2p/…"
        )
    return address


def _written_right(text: str) -> str:
    """Tell what is wrong with an address of another form, and how it is written where that can be told."""
    host, _, port = text.strip().rpartition(":")
    for one, number in ((text.strip(), "31337"), (host.strip("[]"), port)):
        try:
            version = ipaddress.ip_address(one).version
        except ValueError:
            continue
        if number.isascii() and number.isdigit():
            return f"write it as /ip{version}/{one}/tcp/{number}, with the port that leads to this machine"
    return "it does not have the form /ip4/HOST/tcp/PORT"


def _not_announced(text: str, reason: str) -> UserError:
    return UserError(
        f"Cannot announce {text!r} (--announce): {reason}. A right one looks like {EXAMPLE.partition('/p2p/')[0]}"
    )


def peer_id_in(address: str) -> PeerId:
    """The peer id at the end of an address. Raises `UserError` as `check_address` does."""
    return PeerId(check_address(address).rsplit("/", 1)[1])


def without_peer(address: str) -> str:
    """The address to dial, without the peer that is expected there."""
    return check_address(address).rsplit("/p2p/", 1)[0]


def host_of(address: str) -> Host | None:
    """The host of a multiaddress, IPv4 also where it is written as IPv6; None for a name and for nonsense."""
    _, kind, text, *_ = [*address.split("/"), "", ""]
    try:
        if kind not in ("ip4", "ip6"):
            return None
        host = ipaddress.IPv4Address(text) if kind == "ip4" else ipaddress.IPv6Address(text)
    except ValueError:
        return None
    return (host.version == 6 and host.ipv4_mapped) or host


def is_loopback(address: str) -> bool:
    """Return whether an address can be dialled from its own machine only."""
    host = host_of(address)
    return host is not None and host.is_loopback


def is_private(address: str) -> bool:
    """Return whether an address leads anywhere within its own network or machine alone; false for a name."""
    host = host_of(address)
    return host is not None and not host.is_global


def network_of(addresses: Sequence[str]) -> str:
    """The network, /24 or /48, of the first of them that is public, else of the first that is any; empty without.

    Whoever has one address of such a network easily has many.
    """
    hosts = [host for address in addresses if (host := host_of(address)) is not None]
    host = next((host for host in hosts if host.is_global), hosts[0] if hosts else None)
    if host is None:
        return ""
    if host.version == 4:
        return str(ipaddress.IPv4Network((int(host), 24), strict=False))
    return str(ipaddress.IPv6Network((int(host), 48), strict=False))


@dataclass(frozen=True)
class Whereabouts:
    """This peer's whereabouts: what it may dial on the word of others depends on them."""

    hosts: frozenset[Host]  # addresses of this machine, and those that it announces
    is_local: bool  # the whole swarm is on this machine

    def may_dial(self, address: str) -> bool:
        """Return whether to dial an address, with or without /p2p/, that somebody else has named.

        Anybody may name any: unchecked, a record would make its readers knock at doors of their own machine, of their
        home network, or of somebody who has nothing to do with the run. An address that was typed is always dialled.
        """
        parts = address.split("/")
        host = host_of(address)
        if host is None or parts[3:4] != ["tcp"] or not _is_high_port("".join(parts[4:5])):
            return False
        if host.is_loopback:
            return self.is_local
        for private in _PRIVATE:
            if host in private:
                return any(own in private for own in self.hosts)
        return _is_public(host)


def dialable(addresses: Sequence[str], here: Whereabouts) -> list[str]:
    """The addresses, among those named by somebody else, that may be dialled from `here`."""
    return [address for address in addresses if here.may_dial(address)]


def _is_high_port(text: str) -> bool:
    return len(text) <= 5 and text.isascii() and text.isdigit() and _FIRST_PORT <= int(text) < 65_536


def _is_public(host: Host) -> bool:
    """Return whether a host is somebody's on the Internet: link-local, multicast, documentation etc. are nobody's."""
    if host.version == 6 and (host.scope_id or host not in _UNICAST_6 or host in _6TO4):
        return False
    return host.is_global and not host.is_multicast and not host.is_reserved


def _check_host(address: str, kind: str, host: str) -> None:
    if kind not in _HOST_KINDS:
        raise _bad(address, f"it begins with /{kind}/ instead of one of /" + "/, /".join(_HOST_KINDS) + "/")
    try:
        if kind == "ip4":
            ipaddress.IPv4Address(host)
        elif kind == "ip6":
            if (
                ipaddress.IPv6Address(host).scope_id is not None
            ):  # of this machine's interfaces; libp2p takes none
                raise ValueError(host)
        elif len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.split(".")):
            raise ValueError(host)
    except ValueError as error:
        why = ", and no name of a host has an underscore" if "_" in host else ""
        raise _bad(address, f"{host!r} is not an address of kind {kind}{why}") from error


def _check_port(address: str, tcp: str, port: str) -> None:
    if tcp != "tcp":
        raise _bad(address, f"peers listen on tcp, not on {tcp!r}")
    if not (len(port) <= 5 and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _bad(address, f"{port!r} is not a port between 1 and 65535")


def _bad(address: str, reason: str) -> UserError:
    return UserError(f"Cannot use the address {address!r}: {reason}. A right one looks like {EXAMPLE}")
