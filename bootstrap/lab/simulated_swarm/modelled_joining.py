"""A simulated newcomer's way to a stage, as `node.membership.newcomer`, whose decisions it calls; its download.

Left out are the links that newcomers measure and the owner's plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bootstrap.lab.simulated_swarm.disagreement import Opinion
from bootstrap.lab.simulated_swarm.modelled_dht import ANNOUNCEMENT_BYTES, look_bytes
from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE
from bootstrap.lab.simulated_swarm.swarm_peer import RUN_ID, SwarmPeer
from node.membership.capacity import Peer, peers_of, surveyed
from node.membership.discovery import STAGES_AT_ONCE
from node.membership.joining import PROBED_PEERS, patience
from node.membership.newcomer import INTENTION_LIFETIME, LOOKS, SETTLE_SECONDS
from node.membership.stage_choice import better_stage, choose_stage
from node.membership.view import Member
from protocol.ground import PeerId
from protocol.records.announcement import Announcement, joining_key

if TYPE_CHECKING:
    from bootstrap.lab.simulated_swarm.swarm_world import SwarmWorld

DONORS = 4  # of one download at a time
PIECE_BYTES = 4_000_000  # 2^18 parameters with all that belongs to them
STATE_SHARES = 4  # times what partners exchange: φ, δ and AdamW's moments
WAITS_FOR_DONOR = 2.0  # seconds between looks for one


class Joining:
    """A simulated newcomer's way to a stage.

    Mutable state: who was asked whether it lives, and the claim.
    """

    def __init__(self, peer: SwarmPeer) -> None:
        self._peer = peer
        self._world: SwarmWorld = peer.world
        self._asked: dict[PeerId, bool] = {}
        self._work = peer.world.work

    def join(self) -> Iterator[float]:
        """Join a stage: yields the seconds to wait, until the peer serves."""
        peer, world = self._peer, self._world
        arrival = (world.now, peer.peer)
        intention = Announcement(stage=0, state="joining", since=world.now, addresses=[peer.address])
        key = joining_key(RUN_ID)
        world.dht.put(peer, key, Member(peer.peer, intention, world.now + INTENTION_LIFETIME))
        world.measures.looked_up(ANNOUNCEMENT_BYTES)
        yield SETTLE_SECONDS
        newcomers = world.dht.get(peer, key)
        world.measures.looked_up(look_bytes(len(newcomers)))
        peers, seconds = self._survey()
        yield seconds
        placed = {p.peer for p in peers}
        choosing = [
            (m.announcement.since, m.peer)
            for m in newcomers
            if m.peer not in placed and world.peers[m.peer].is_alive
        ]
        stage = choose_stage(peers, self._work, choosing, arrival, world.stages)
        yield from self._settle(stage)
        yield from self._download()

    def _survey(self) -> tuple[list[Peer], float]:
        """The peers that serve, or have claimed, a stage and answer; and the seconds that it takes to ask."""
        peer, world = self._peer, self._world
        nbytes = sum(peer.look(stage) for stage in world.stages)
        peers = [p for stage in world.stages for p in peers_of(peer.view, stage, world.now)]
        peers = [p for p in peers if p.peer != peer.peer]
        unknown = [p.peer for p in peers if p.peer not in self._asked][:PROBED_PEERS]
        for other in unknown:
            self._asked[other] = world.peers[other].is_alive
            world.measures.looked_up(2 * MESSAGE)
        silent = sum(not self._asked[other] for other in unknown)
        in_turn = math.ceil(len(world.stages) / STAGES_AT_ONCE)
        seconds = in_turn * world.dht.seconds(len(world.alive), nbytes // in_turn, peer.uplink)
        answered = world.network.round_trip
        seconds += patience(len(unknown), silent, answered) if silent else answered
        return surveyed(p for p in peers if self._asked.get(p.peer, True)), seconds

    def _settle(self, stage: int) -> Iterator[float]:
        """Settle on a stage as `Newcomer._settle` does."""
        peer, world = self._peer, self._world
        self._claim(stage)
        for look in range(LOOKS):
            yield SETTLE_SECONDS * peer.rng.uniform(1, 2)
            peers, seconds = self._survey()
            yield seconds
            mine = Peer(peer.peer, peer.stage, since=peer.since, is_serving=False)
            met = sum(p.stage == peer.stage and not p.is_serving for p in peers)
            is_last_word = look == LOOKS - 1
            better = better_stage(
                [*peers, mine], self._work, peer.peer, world.stages, is_last_word=is_last_word
            )
            if better is None and (not met or look):
                return
            if better is not None:
                peer.announce("leaving")
                self._claim(better)

    def _claim(self, stage: int) -> None:
        self._peer.stage, self._peer.since = stage, self._world.now
        self._peer.announce("joining")

    # --- the state ----------------------------------------------------------------------------

    def _download(self) -> Iterator[float]:
        """Download from a few replicas at once, in pieces; without any, take the stage's first state."""
        yield from download(self._peer)


def download(peer: SwarmPeer) -> Iterator[float]:
    """Download the state: yields the seconds to wait, until it is there and the peer serves."""
    world = peer.world
    pieces = max(1, STATE_SHARES * world.scenario.run.state_bytes // PIECE_BYTES)
    size = STATE_SHARES * world.scenario.run.state_bytes // pieces
    while True:
        peer.look(peer.stage)
        holding = [p for p in peer.view.holding(peer.stage, world.now) if p != peer.peer]
        donors = [world.peers[p] for p in peer.rng.sample(holding, min(DONORS, len(holding)))]
        living = [d for d in donors if d.is_alive and d.serves and d.stage == peer.stage]
        if living or not holding:
            break
        for donor in donors:
            peer.view.suspect(donor.peer)
        yield WAITS_FOR_DONOR
    for first in range(0, pieces, max(1, len(living))):
        if not living:
            break
        arrives = world.now
        for donor in living[: pieces - first]:
            leaves = world.network.send(donor, peer, "state", size, _arrived)
            arrives = max(arrives, leaves + world.network.latency(donor, peer))
        yield arrives - world.now
    source = living[0].rounds if living else None
    opinion = Opinion([world.scenario.run.seed, peer.number, 1], None if source is None else source.opinion)
    peer.serve(peer.stage, opinion)
    world.start(peer.discover(), peer)
    world.start_moving(peer)


def _arrived() -> None:
    """Ignore the arrival of a piece: the download goes on by the time that its last one takes."""
