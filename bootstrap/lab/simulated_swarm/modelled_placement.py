"""The world around a simulated peer on its way to a stage, which is `node.membership.placement`'s; its download.

Left out are the links that newcomers measure and the owner's plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

from bootstrap.lab.simulated_swarm.disagreement import Opinion
from bootstrap.lab.simulated_swarm.modelled_dht import ANNOUNCEMENT_BYTES, look_bytes
from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE
from bootstrap.lab.simulated_swarm.swarm_peer import RUN_ID, SwarmPeer
from bootstrap.lab.simulated_swarm.swarm_space import SwarmSpace
from node.membership.capacity import MovePatience, Peer, peers_of, surveyed
from node.membership.discovery import STAGES_AT_ONCE
from node.membership.joining import PROBED_PEERS, patience
from node.membership.moving import LONGEST_CLAIM
from node.membership.newcomer import INTENTION_LIFETIME
from node.membership.placement import PATIENCE, Choice, Moves, Survey
from node.membership.stage_choice import Arrival
from node.membership.view import Member, View
from protocol.ground import PeerId
from protocol.records.announcement import Announcement, joining_key, moving_key

DONORS = 4  # of one download at a time
PIECE_BYTES = 4_000_000  # 2^18 parameters with all that belongs to them
STATE_SHARES = 4  # times what partners exchange: φ, δ and AdamW's moments
WAITS_FOR_DONOR = 2.0  # seconds between looks for one


class Pause:
    """A pause of a modelled peer, which awaits it; the seconds go to `SwarmSpace.start`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


class _Surroundings:
    """The world around a peer on any way."""

    def __init__(self, peer: SwarmPeer) -> None:
        self._peer = peer
        self._world: SwarmSpace[SwarmPeer] = peer.world

    def elapsed(self) -> float:
        return self._world.now

    async def wait(self, seconds: float) -> None:
        await Pause(seconds)


class Newcomer(_Surroundings):
    """The world around a newcomer: see `AroundNewcomer`.

    Mutable state: which peers were asked whether they live, and the answers.
    """

    def __init__(self, peer: SwarmPeer) -> None:
        super().__init__(peer)
        self._is_alive: dict[PeerId, bool] = {}

    def join(self) -> Iterator[float]:
        """Join a stage: yields the seconds to wait, until the peer serves."""
        peer, world = self._peer, self._world
        rng = random.Random(f"{peer.peer}/stage")  # its own, as a node's is
        yield from Choice(peer.peer, world.work, world.stages, rng, self).choose().__await__()
        yield from download(peer)

    async def announce_intention(self) -> Arrival:
        peer, world = self._peer, self._world
        intention = Announcement(stage=0, state="joining", since=world.now, addresses=[peer.address])
        lasting = Member(peer.peer, intention, world.now + INTENTION_LIFETIME)
        world.dht.put(peer, joining_key(RUN_ID), lasting)
        world.measures.looked_up(ANNOUNCEMENT_BYTES)
        return world.now, peer.peer

    async def read_newcomers(self) -> list[Arrival]:
        newcomers = self._world.dht.get(self._peer, joining_key(RUN_ID))
        self._world.measures.looked_up(look_bytes(len(newcomers)))
        return [(each.announcement.since, each.peer) for each in newcomers]

    async def survey_living(self) -> list[Peer]:
        peer, world = self._peer, self._world
        nbytes = sum(peer.look(stage) for stage in world.stages)
        in_turn = math.ceil(len(world.stages) / STAGES_AT_ONCE)
        await Pause(in_turn * world.dht.seconds(len(world.alive), nbytes // in_turn, peer.uplink))
        peers = [p for stage in world.stages for p in peers_of(peer.view, stage, world.now)]
        peers = [p for p in peers if p.peer != peer.peer]
        dead = await self.ask_whether_alive([p.peer for p in peers])
        return surveyed(p for p in peers if p.peer not in dead)

    async def ask_whether_alive(self, peers: Sequence[PeerId]) -> set[PeerId]:
        world = self._world
        unknown = [p for p in peers if p not in self._is_alive and p != self._peer.peer][:PROBED_PEERS]
        for other in unknown:
            self._is_alive[other] = world.peers[other].is_alive
            world.measures.looked_up(2 * MESSAGE)
        if unknown:
            silent, answered = sum(not self._is_alive[other] for other in unknown), world.network.round_trip
            await Pause(patience(len(unknown), silent, answered) if silent else answered)
        return {peer for peer, is_alive in self._is_alive.items() if not is_alive}

    async def measure_links(self, peers: Sequence[PeerId]) -> None:
        pass

    def excess(self, peers: Sequence[Peer]) -> Mapping[int, float]:
        return {}

    def report_choice(
        self, stage: int, peers: Sequence[Peer], rivals: int, excess: Mapping[int, float]
    ) -> None:
        pass

    async def claim_stage(self, stage: int, instead_of: int | None = None) -> float:
        if instead_of is not None:
            self._peer.announce("leaving")
        self._peer.stage, self._peer.since = stage, self._world.now
        self._peer.announce("joining")
        return self._world.now


class _ServesNoMore(Exception):
    """Ends the way of a member that has left its stage, or the swarm."""


class Settled(_Surroundings):
    """The world around a member that may move: see `AroundMember`."""

    def __init__(self, peer: SwarmPeer) -> None:
        super().__init__(peer)
        self._stage = peer.stage

    def move(self) -> Iterator[float]:
        """Move when it is due: yields the seconds to wait; ends with the peer's service at this stage."""
        peer, world, lifetime = self._peer, self._world, self._world.scenario.run.record_lifetime
        lasting = MovePatience(PATIENCE * lifetime)
        moves = Moves(peer.peer, peer.stage, world.work, world.stages, lifetime, lasting, peer.rng, self)
        try:
            call = yield from moves.wait_for_call(world.scenario.count).__await__()
        except _ServesNoMore:
            return
        if world.measures.counts:
            world.measures.moves += 1
        world.measures.log(world.now, "moves", peer.peer, f"{self._stage} to {call.target}")
        peer.announce("leaving")
        peer.leave_stage()
        peer.stage, peer.since = call.target, world.now
        peer.announce("joining")
        yield from download(peer)
        self._put_lease(0.0)

    async def wait(self, seconds: float) -> None:
        await Pause(seconds)
        if not self._peer.serves or self._peer.stage != self._stage:
            raise _ServesNoMore

    async def read_plan(self) -> None:
        pass

    def planned(self, peers: Sequence[Peer]) -> Mapping[PeerId, int]:
        return {}

    async def survey_all(self, watched: Collection[int] = ()) -> Survey:
        world, view, peers = self._world, View(self._world.queue.clock), list[Peer]()
        for stage in world.stages:
            if stage not in watched:
                self._peer.look(stage, view)
            peers += peers_of(self._peer.view if stage in watched else view, stage, world.now)
        knows_me = any(p.peer == self._peer.peer for p in peers)
        return Survey(surveyed(peers) if knows_me else [], len(peers), world.now)

    async def read_leases(self, peers: Sequence[Peer]) -> list[Arrival]:
        found = self._world.dht.get(self._peer, moving_key(RUN_ID))
        self._world.measures.looked_up(look_bytes(len(found)))
        others = (m for m in found if m.peer != self._peer.peer and m.announcement.state == "joining")
        return [(m.announcement.since, m.peer) for m in others]

    async def take_lease(self, source: int, target: int) -> float | None:
        self._put_lease(LONGEST_CLAIM)
        return self._world.now

    def keep_lease(self) -> None:
        pass

    async def withdraw_lease(self) -> None:
        self._put_lease(0.0)

    def _put_lease(self, lifetime: float) -> None:
        """Announce a move; one that is withdrawn ends at once."""
        peer, now = self._peer, self._world.now
        said = Announcement(stage=peer.stage, state="joining", since=now, addresses=[peer.address])
        self._world.dht.put(peer, moving_key(RUN_ID), Member(peer.peer, said, now + lifetime))

    def fits(self, source: int, target: int) -> bool:
        return True

    async def has_stand_in(self, stage: int) -> bool:
        others = [p.peer for p in (await self.survey_all()).peers if p.stage == stage and p.is_serving]
        return any(self._world.peers[p].is_alive for p in others if p != self._peer.peer)


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
    start_moving(peer)


def start_moving(peer: SwarmPeer) -> None:
    """Let a peer that serves move when it is due."""
    if len(peer.world.stages) > 1:
        peer.world.start(Settled(peer).move(), peer)


def _arrived() -> None:
    """Ignore the arrival of a piece: the download goes on by the time that its last one takes."""
