"""Peers of another protocol cannot be talked to, but they say which one they speak: what to upgrade can be told.

This much stays as it is in every version: whoever opens a stream of `VERSION_PROTOCOL` gets `LINE_BYTES` bytes: the
number of the protocol and the version of the program, padded with spaces.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from protocol.errors import NolocoError, legible
from protocol.ground import PeerId
from protocol.transport.base import Stream, Transport
from protocol.version import own_version

PROTOCOL = 1  # counted up when peers of the one before could not work with those of this one
VERSION_PROTOCOL = "/noloco/version"
LINE_BYTES = 64


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


def what_to_upgrade(spoken: Spoken) -> str:
    """A sentence for a peer that speaks another protocol than this one; empty for the same."""
    if spoken.protocol == PROTOCOL:
        return ""
    theirs = f"They run noloco-node {spoken.program} with protocol {spoken.protocol}"
    mine = f"this is {own_version() or 'a copy'} with protocol {PROTOCOL}"
    if spoken.protocol > PROTOCOL:
        return f"{theirs}, {mine}. Upgrade this one: pip install --upgrade noloco-node"
    return (
        f"{theirs}, {mine}. Ask them to upgrade, or install theirs: pip install noloco-node=={spoken.program}"
    )
