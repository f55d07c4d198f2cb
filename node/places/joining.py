"""From an address to a place in the run: reach somebody, learn the manifest, choose a stage."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from node.config import NodeConfig
from node.places.discovery import DHT_DEADLINE, read_stage
from node.places.greeting import Greeting, NobodyGreets, greet
from node.places.membership import View
from node.places.outside import inner_port, is_outside
from node.places.stage_choice import choose_stage
from node.state.directory import StateDirectory
from node.watch.events import Events
from protocol.announcement import Announcement, joining_key, parse_announcement
from protocol.errors import JoinError, NolocoError, RecordError
from protocol.manifest import SignedManifest
from protocol.messages import Hello, Welcome
from protocol.rpc import Rpc, Traffic
from protocol.transport.base import PeerId, Transport

logger = logging.getLogger(__name__)

DIAL_DEADLINE = 15.0
SETTLE_SECONDS = 1.5  # for newcomers that start together to see each other's intention
INTENTION_LIFETIME = 8.0  # a newcomer that dies while it chooses must not count for long
PROBE_DEADLINE = 3.0
GREETINGS = 5  # tries, a second apart
PROBED_PEERS = 48
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


async def find_stage(
    config: NodeConfig,
    transport: Transport,
    rpc: Rpc,
    signed: SignedManifest,
    view: View,
    me: PeerId,
    previous: int | None,
    events: Events,
) -> int:
    """The stage asked for, the one served before, or the one that needs replicas most.

    Newcomers that choose at the same time announce it first, and each then takes its own place in the order.
    """
    stages = signed.manifest.stages
    if config.stage >= stages:
        raise JoinError(f"This run has stages 0 to {stages - 1}; --stage {config.stage} does not exist.")
    for stage in range(stages):
        await read_stage(transport, signed.run_id, stage, view)
    if config.stage >= 0:
        return config.stage
    if previous is not None:
        return previous
    since = transport.now()
    intention = Announcement(stage=0, state="joining", since=since)
    key = joining_key(signed.run_id)
    await transport.put(key, intention.to_bytes(), INTENTION_LIFETIME, DHT_DEADLINE)
    await asyncio.sleep(SETTLE_SECONDS)
    newcomers: list[tuple[float, PeerId]] = []
    for record in await transport.get(key, DHT_DEADLINE):
        try:
            peer, announcement = parse_announcement(record)
        except RecordError:
            continue
        newcomers.append((announcement.since, peer))
    for stage in range(stages):
        await read_stage(transport, signed.run_id, stage, view)
    now = transport.now()
    members = [member for stage in range(stages) for member in view.members(stage, now)]
    dead = await silent(rpc, [member.peer for member in members if member.peer != me])
    replicas = Counter(m.announcement.stage for m in members if m.peer != me and m.peer not in dead)
    placed = {member.peer for member in members}
    choosing = [(when, peer) for when, peer in newcomers if peer not in placed]
    stage = choose_stage(stages, replicas, choosing, (since, me))
    counts = ", ".join(f"{replicas.get(s, 0)} of stage {s}" for s in range(stages))
    events.say(
        f"Taking stage {stage}: {counts} answer; {len(dead)} do not; {len(choosing)} newcomers choose, too.",
        "chose-stage",
        stage=stage,
        dead=sorted(dead),
    )
    return stage


async def silent(rpc: Rpc, peers: list[PeerId]) -> set[PeerId]:
    """Which of the peers do not answer: a record outlives its peer by its lifetime.

    Asks a few dozen at most; among more, one death does not change which stage is the smallest.
    """

    async def answers(peer: PeerId) -> bool:
        try:
            await rpc.call(peer, Traffic.CONTROL, Hello(), Welcome, deadline=PROBE_DEADLINE)
        except NolocoError:
            return False
        return True

    asked = peers[:PROBED_PEERS]
    answered = await asyncio.gather(*(answers(peer) for peer in asked))
    return {peer for peer, alive in zip(asked, answered, strict=True) if not alive}
