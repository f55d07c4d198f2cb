"""An invitation to a run: the line that a volunteer types, or has a camera read, and the addresses for it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from bootstrap.display import write_whole
from protocol.records.addresses import SEED_PORT

ADDRESSES = "addresses.txt"  # of the seed peer, beside its key: as it was last started
NEAREST_LAST = ("everywhere", "this network", "this machine")
RUN_DIRECTORY = Path("noloco-run")  # --state-dir, where none is named
NO_ADDRESS = "ADDRESS"  # where none is known, for people to fill in


def reach_of(address: str) -> str:
    """Say from where an address can be reached: "this machine", "this network" or "everywhere"."""
    parts = address.split("/")
    if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
        host = ipaddress.ip_address(parts[2])
        if host.is_loopback:
            return "this machine"
        if host.is_private or host.is_link_local:
            return "this network"
    return "everywhere"


def keep_addresses(directory: Path, addresses: Sequence[str]) -> None:
    """Write the seed peer's addresses beside its key, for `noloco invite`. Raises `UserError`."""
    listed = "".join(f"{address}\n" for address in addresses)
    write_whole(directory / ADDRESSES, listed, "Choose another --state-dir.")


def kept_addresses(directory: Path) -> list[str]:
    """Return the addresses at which the seed peer of `directory` was last up; none if they cannot be read."""
    try:
        return (directory / ADDRESSES).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


def in_a_line(addresses: Sequence[str], token: str = "") -> str:
    """Return the command to join with, through the address that most can reach."""
    command = f"noloco join {_widest(addresses)}"
    return f"{command} --token {token}" if token else command


def in_words(addresses: Sequence[str], words: str) -> str:
    """Return the command to join with by an invitation's words, at the host that most can reach."""
    parts = _widest(addresses).split("/")
    if len(parts) < 5:
        return f"noloco join {words} --at HOST"
    host = f"[{parts[2]}]" if parts[1] == "ip6" else parts[2]
    port = "" if parts[4] == str(SEED_PORT) else f":{parts[4]}"
    return f"noloco join {words} --at {host}{port}"


def _widest(addresses: Sequence[str]) -> str:
    """Return the address that most can reach."""
    return min(addresses, key=lambda address: NEAREST_LAST.index(reach_of(address)), default=NO_ADDRESS)


def show_code(line: str, where: TextIO) -> None:
    """Draw the line for a camera, on a terminal and with segno installed, which the extra `qr` brings.

    Nothing is drawn of an address that is to be filled in, or that only this machine can reach.
    """
    address = line.split()[2]
    if address == NO_ADDRESS or reach_of(address) == "this machine":
        return
    if where.isatty() and find_spec("segno"):
        import_module("segno").make(line, micro=False).terminal(out=where, compact=True)
