"""From an address to the run: reach somebody, learn the manifest."""

from __future__ import annotations

import asyncio
import logging

from node.config import NodeConfig
from node.membership.greeting import Greeting, NobodyGreets, greet
from node.membership.outside import inner_port, is_outside
from node.model.state_directory import StateDirectory
from node.watch.events import Events
from protocol.errors import JoinError
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
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
        own = transport.addresses()
        port = 0 if config.announce else inner_port(own)
        greeting = await _greeted(rpc, transport, sorted(reached), expected, port, known)
        if greeting is None:
            assert known is not None
            return known
        if state is not None:
            state.save_manifest(greeting.signed)
        if is_outside(greeting.reached, own):
            await _announce_outside(transport, greeting.reached, own, events)
        return greeting.signed
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
    port: int,
    known: SignedManifest | None,
) -> Greeting | None:
    """The first peer's that has the manifest. Peers that start at this moment get some time.

    A returning node that meets only such peers goes on with its own manifest, and gets None: they may all wait for
    each other.
    """
    for attempt in range(GREETINGS):
        try:
            greeting = await greet(rpc, transport, peers, expected, port)
        except NobodyGreets:
            if known is not None:
                return None
            if attempt == GREETINGS - 1:
                raise
            await asyncio.sleep(1.0)
        else:
            logger.debug("The clock differs by %.3f s", greeting.offset)
            return greeting
    raise AssertionError("the loop returns or raises")


async def _announce_outside(transport: Transport, outside: str, own: list[str], events: Events) -> None:
    """Others shall dial this node where a peer has reached it, not at addresses of its private network."""
    await transport.announce([outside])
    events.say(
        f"Announcing {outside}: a peer has reached this node there. (--announce names another address.)",
        "outside",
        address=outside,
        instead_of=own,
    )
