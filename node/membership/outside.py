"""Finds the address under which the rest of the world reaches a node behind a mapped port.

A container's own address (172.17.x.x) is of no use to others. What is announced instead is, in this order: what the
volunteer names with --announce; what the platform that rents the machine out says in the environment; what the
peers that greet this node see and have tried. Where nothing is known, the machine's own addresses stay. One peer's
word, or that of several of one network, only adds an address to them: it may be the liar's own.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protocol.errors import UserError
from protocol.ground import PeerId
from protocol.records.addresses import check_announced, is_loopback

logger = logging.getLogger(__name__)

WITNESSES = (
    2  # networks that must agree: that this node can be dialled, or on an address that replaces its own
)
MOST_TOLD = 2  # addresses that are only told: a reader dials the eight of a record at once
MOST_ANNOUNCED = 8
_NEIGHBOURHOOD = 16  # bits: container networks and home networks are no larger


@dataclass(frozen=True)
class Platform:
    """Names of the variables that a platform sets in its containers, the second one followed by the inner port."""

    name: str
    address: str
    port: str
    advice: str  # with {port}: how to get the port mapped


PLATFORMS = (
    Platform(
        "RunPod",
        "RUNPOD_PUBLIC_IP",
        "RUNPOD_TCP_PORT_",
        "Add {port} to the pod's exposed TCP ports, and take a machine with a public address.",
    ),
    Platform(
        "Vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_", "Add -p {port}:{port} to the instance's docker options."
    ),
)


@dataclass(frozen=True)
class Rented:
    """The outside address by the environment, empty where it names none, and a warning for the volunteer."""

    address: str = ""
    warning: str = ""


def announced(given: Sequence[str], port: int, own: PeerId | None = None) -> tuple[str, ...]:
    """The addresses to announce from the start: the volunteer's, else that of a rented machine's environment.

    `own` is this peer's id. Raises `UserError` for an address of the volunteer's at which nobody can dial this peer.
    """
    if given and not port:
        raise UserError("--announce names an address that leads to a fixed port here: choose it with --port.")
    if given:
        return tuple(check_announced(address, own) for address in given)
    found = rented(port, os.environ)
    if found.warning:
        logger.warning(found.warning)
    return (found.address,) if found.address else ()


def rented(port: int, environment: Mapping[str, str]) -> Rented:
    """The outside address of `port` on a rented machine, as its platform tells it."""
    for platform in PLATFORMS:
        host = environment.get(platform.address, "").strip()
        outer = environment.get(f"{platform.port}{port}", "").strip()
        if host and outer:
            if _is_host(host) and outer.isascii() and outer.isdigit() and 0 < int(outer) < 65536:
                return Rented(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{outer}")
            return Rented(
                warning=f"{platform.name} names {host!r}, port {outer!r}, as this machine's outside address, "
                "which is not a valid one. Give the right one with --announce."
            )
        if outer or any(name.startswith(platform.port) for name in environment):
            return Rented(
                warning=f"{platform.name} maps no port to {port} here, so others cannot dial this node. "
                + platform.advice.format(port=port)
            )
    return Rented()


def inner_port(addresses: Sequence[str]) -> int:
    """The port to have tried from outside, for a node that knows none but private addresses; 0 otherwise."""
    places = [place for place in map(_place, addresses) if place is not None and not place[0].is_loopback]
    if not places or any(not host.is_private for host, _ in places):
        return 0
    return places[0][1]


def listening_port(addresses: Sequence[str]) -> int:
    """The port that peers elsewhere would dial; 0 for a node that others on this machine alone can dial."""
    return next((port for host, port in filter(None, map(_place, addresses)) if not host.is_loopback), 0)


def is_outside(address: str, own: Sequence[str]) -> bool:
    """Return whether an address at which a peer has reached this node is one for the rest of the world.

    Seen from a neighbour in the same private network it is not; nor is the gateway that a container is behind.
    """
    place = _place(address)
    if place is None or place[0].is_loopback:
        return False
    return not any(
        known is not None
        and known[0].version == place[0].version
        and place[0] in ipaddress.ip_network(f"{known[0]}/{_NEIGHBOURHOOD}", strict=False)
        for known in map(_place, own)
    )


@dataclass(frozen=True)
class Told:
    """The address at which a peer claims to have reached this node, and the network of that peer."""

    address: str
    network: str


def is_dialled(told: Sequence[Told]) -> bool | None:
    """Return whether others can dial this node; None while the only network that claims it stands against others.

    Each network has one vote, that of most of its peers. Where only one network answers, it decides alone.
    """
    votes = dict[str, list[bool]]()
    for each in told:
        votes.setdefault(each.network, []).append(bool(each.address))
    reached = sum(2 * sum(vote) > len(vote) for vote in votes.values())
    if not reached:
        return False
    return True if reached >= min(WITNESSES, len(votes)) else None


def outside_addresses(told: Sequence[Told], own: Sequence[str]) -> list[str]:
    """Return the addresses to announce, without /p2p/; none if no peer names an outside address.

    An address that peers of `WITNESSES` networks agree on is announced alone. Otherwise the `MOST_TOLD` named by most
    networks come first, then this node's own.
    """
    witnesses: dict[str, set[str]] = {}
    for each in told:
        with suppress(UserError):  # p2pd exits when it is given an invalid address
            address = check_announced(each.address)
            if is_outside(address, own):
                witnesses.setdefault(address, set()).add(each.network)
    if not witnesses:
        return []
    found = sorted(witnesses, key=lambda address: -len(witnesses[address]))
    if len(witnesses[found[0]]) >= WITNESSES:
        return found[:1]
    kept = [address.partition("/p2p/")[0] for address in own if not is_loopback(address)]
    return list(dict.fromkeys([*found[:MOST_TOLD], *kept]))[:MOST_ANNOUNCED]


def _place(address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
    """The host and the TCP port of a multiaddress; None for a name, a relay or another transport."""
    _, kind, host, tcp, port, *_ = [*address.split("/"), "", "", "", "", ""]
    if kind not in ("ip4", "ip6") or tcp != "tcp" or not port.isdigit() or not _is_host(host):
        return None
    return ipaddress.ip_address(host), int(port)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
