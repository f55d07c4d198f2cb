"""From an address to the run: reach somebody, learn the manifest."""

from __future__ import annotations

import asyncio
import logging

from node.config import NodeConfig
from node.places.greeting import NobodyGreets, greet
from node.state.directory import StateDirectory
from node.watch.events import Events
from protocol.errors import JoinError
from protocol.manifest import SignedManifest
from protocol.rpc import Rpc
from protocol.transport.base import PeerId, Transport

logger = logging.getLogger(__name__)

DIAL_DEADLINE = 15.0
GREETINGS = 5  # tries, a second apart
NO_ADDRESS = (
    "Tell this node where the run is: noloco-node --join /ip4/…/tcp/…/p2p/…\n"
    "The address of any member will do; the run's owner or any volunteer's log has one.\n"
    "To found a run of your own: noloco-bootstrap --preset tiny. To try it alone: noloco swarm."
)


async def find_run(
    config: NodeConfig, transport: Transport, rpc: Rpc, state: StateDirectory | None, events: Events
) -> SignedManifest:
    """Reach a member and get the manifest; a returning node may go on alone with the one that it has.

    Raises `JoinError` or `ClockError` with what to do.
    """
    known = state.manifest() if state is not None else None
    book = state.peer_book() if state is not None else []
    if not config.join and known is None:
        raise JoinError(NO_ADDRESS)
    reached = await transport.connect([*config.join, *book], DIAL_DEADLINE)
    expected = config.run or (known.run_id if known else None)
    if reached:
        signed = await _greeted(rpc, transport, sorted(reached), expected, known)
        if state is not None:
            state.save_manifest(signed)
        return signed
    if known is not None:
        events.warn(
            "None of the known peers answers. This node goes on with its saved state and keeps looking.",
            "nobody-reached",
        )
        return known
    raise JoinError(
        "No peer answered at:\n  " + "\n  ".join(config.join) + "\n"
        "Check that the address is complete and current, that the peer runs, and that its TCP port is open "
        "in the firewalls between."
    )


async def _greeted(
    rpc: Rpc,
    transport: Transport,
    peers: list[PeerId],
    expected: str | None,
    known: SignedManifest | None,
) -> SignedManifest:
    """The manifest from the first peer that has it. Peers that start at this moment get some time.

    A returning node that meets only such peers goes on with its own: they may all wait for each other.
    """
    for attempt in range(GREETINGS):
        try:
            signed, offset = await greet(rpc, transport, peers, expected)
        except NobodyGreets:
            if known is not None:
                return known
            if attempt == GREETINGS - 1:
                raise
            await asyncio.sleep(1.0)
        else:
            logger.debug("The clock differs by %.3f s", offset)
            return signed
    raise AssertionError("the loop returns or raises")
