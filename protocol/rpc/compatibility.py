"""What versions of this program owe each other on the wire, and how they find out what both can (docs/versions.md).

`PROTOCOL` is the number that both sides must share: peers of another one cannot be talked to, but say which one they
speak, so that what to upgrade can be told. This much stays as it is in every version: whoever opens a stream of
`VERSION_PROTOCOL` gets `LINE_BYTES` bytes: the number of the protocol and the version of the program, padded with
spaces. `MINOR` grows with what a version knows more. What two peers must share for one thing alone is a feature,
named after the thing and numbered; a record names its signer's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import NolocoError, legible
from protocol.files.installation import upgrade_line
from protocol.ground import PeerId
from protocol.transport.base import Stream, Transport
from protocol.version import PROTOCOL, own_version

BOUNDARY, EXCHANGE = "boundary", "exchange"  # microbatches between two stages, and contributions of a pair
FEATURES = ("boundary-1", "exchange-1")  # of this version; of several of one thing the best first
UNTOLD = ("boundary-1", "exchange-1")  # of versions whose records name none
VERSION_PROTOCOL = "/noloco/version"
LINE_BYTES = 64
# a release as a stranger names it, in a command that people copy into a shell: no other character gets there
RELEASED = re.compile(r"[0-9]{1,6}(\.[0-9a-z]{1,9}){0,5}(?=\+|\Z)")


@dataclass(frozen=True)
class Spoken:
    """A peer's word on what it speaks: the number of its protocol, and the version of its program."""

    protocol: int
    program: str


async def serve_version(transport: Transport) -> None:
    """Tell whoever asks, from now on."""

    async def tell(stream: Stream) -> None:
        await stream.write(f"{PROTOCOL} {own_version() or '?'}".encode()[:LINE_BYTES].ljust(LINE_BYTES))

    await transport.serve(VERSION_PROTOCOL, tell)


async def spoken_by(transport: Transport, peer: PeerId, deadline: float) -> Spoken | None:
    """Ask what the peer speaks; None when it does not say so within `deadline` seconds. May be repeated."""
    try:
        async with asyncio.timeout(deadline):
            stream = await transport.open(peer, VERSION_PROTOCOL, deadline)
            try:
                line = bytes(await stream.read(LINE_BYTES))
            finally:
                stream.close()
    except (NolocoError, TimeoutError):
        return None
    found = re.fullmatch(rb"([0-9]{1,6}) (\S{1,40}) *", line)
    return Spoken(int(found[1]), legible(found[2].decode(errors="replace"))) if found else None


def in_common(thing: str, theirs: Sequence[str]) -> str:
    """The best feature of this `thing` that this version and a peer with `theirs` both have; empty without one."""
    known = theirs or UNTOLD
    return next((name for name in FEATURES if name.rpartition("-")[0] == thing and name in known), "")


def named_version(program: str) -> str:
    """A program as its record names it, for a sentence."""
    return f"noloco-node {legible(program)}" if program else "an earlier version"


def who_upgrades(program: str) -> str:
    """A sentence on which program to upgrade, this one or another, where they cannot do something together."""
    theirs, mine = order_of(program), order_of(own_version())
    if theirs > mine:
        return f"Upgrade this one: {upgrade_line()}"
    return "Its volunteer should upgrade it"


def order_of(version: str) -> tuple[int, ...]:
    """The numbers of "1.2.3"; what follows them does not count, and no version comes before all."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not (part.isascii() and part.isdigit() and len(part) < 10):
            break
        numbers.append(int(part))
    return tuple(numbers)


def what_to_upgrade(spoken: Spoken) -> str:
    """A sentence for a peer that speaks another protocol than this one; empty for the same."""
    if spoken.protocol == PROTOCOL:
        return ""
    theirs = f"They run noloco-node {spoken.program} with protocol {spoken.protocol}"
    mine = f"this is {own_version() or 'a copy'} with protocol {PROTOCOL}"
    released = RELEASED.match(spoken.program)
    if spoken.protocol > PROTOCOL:
        return f"{theirs}, {mine}. Upgrade this one: {upgrade_line()}"
    theirs_too = f", or install version {released[0]} here" if released else ""
    return f"{theirs}, {mine}. Ask them to upgrade{theirs_too}"
