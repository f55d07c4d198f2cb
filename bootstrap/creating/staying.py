"""Keeps a seed peer connected with its run's members, also when it was started again or on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.membership.joining import DIAL_DEADLINE, greet
from node.storage.state_directory import StateDirectory
from protocol.errors import JoinError, later
from protocol.records.addresses import is_private
from protocol.rpc.rpc import Rpc
from protocol.transport.base import Transport

LOOK_SECONDS = 15.0
MOST_NAMED = 2  # addresses of members, to join through them
LONGEST_PAUSE = 300.0  # between two tries while nobody answers: each says so in the log


async def join_members(rpc: Rpc, run_id: str, addresses: Sequence[str]) -> None:
    """Dial members of the run and join their DHT. Raises `JoinError` if no member of that run answers."""
    reached = await rpc.transport.connect(addresses, DIAL_DEADLINE)
    if not reached:
        raise later(
            JoinError(
                "No member answered at:\n  " + "\n  ".join(addresses) + "\n"
                "Name another one with --join; every member's log shows its addresses."
            )
        )
    await greet(rpc, rpc.transport, sorted(reached), run_id, 0)


async def addresses_to_join(transport: Transport) -> list[str]:
    """Return the addresses to join the run at: where all of this peer's are of its own network, members' as well.

    They are those at which it has dialled members itself: call this before anybody has dialled it.
    """
    own = transport.addresses()
    if not all(map(is_private, own)):
        return own
    places = await transport.remotes()
    dialled = [(place, peer) for peer in sorted(places) for place in places[peer][:1]]
    public = [
        f"{place}/p2p/{peer}" for place, peer in dialled if place.count("/") == 4 and not is_private(place)
    ]
    return [*own, *public[:MOST_NAMED]]


async def stay_with_members(rpc: Rpc, directory: StateDirectory) -> None:
    """Save the addresses of connected peers in the directory; when none is connected, dial them. For ever.

    While nobody answers it dials more and more rarely, down to every `LONGEST_PAUSE`: members may be off for a night.
    Raises `StateError` when the directory cannot be written.
    """
    book, saved, pause = directory.addresses(), set[str](), LOOK_SECONDS
    while True:
        connected = [address for _, known in await rpc.transport.peers() for address in known]
        pause = LOOK_SECONDS if connected else min(2 * pause, LONGEST_PAUSE)
        if not connected and book:
            await rpc.transport.connect(book, DIAL_DEADLINE)
        elif not saved.issuperset(connected):
            saved |= {*connected}
            book = [*connected, *(address for address in book if address not in set(connected))]
            await asyncio.to_thread(directory.save_peer_book, book)
        await asyncio.sleep(pause)
