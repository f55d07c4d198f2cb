"""A whole swarm under a virtual clock: modelled compute, links and DHT, and the daemon's own decisions.

Not simulated are the contents of microbatches, strangers and liars, checks of others' work, the owner's plan and what
a newcomer measures of its links; whoever is behind does not download again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

from bootstrap.lab.simulated_swarm.disagreement import Opinion, expected_spread, spread_of
from bootstrap.lab.simulated_swarm.modelled_placement import Newcomer, start_moving
from bootstrap.lab.simulated_swarm.population import Population
from bootstrap.lab.simulated_swarm.swarm_measures import BIN
from bootstrap.lab.simulated_swarm.swarm_peer import SwarmPeer
from bootstrap.lab.simulated_swarm.swarm_scenario import PeerKind, SwarmScenario
from bootstrap.lab.simulated_swarm.swarm_space import SwarmSpace
from node.membership.buckets import StageSize, level_of

STARTED_WITHIN = 4.0  # seconds, in which the first peers begin
LOOKED_AT = 20  # peers at each moment, whether their views hold what they should have forgotten
SPREAD_SAMPLE = 256  # replicas of a stage


class SwarmWorld(SwarmSpace[SwarmPeer]):
    """A simulated swarm: peers come, train and go, and are watched.

    Mutable state besides: the speed of all that live.
    """

    def __init__(self, scenario: SwarmScenario, keeps_events: bool = False) -> None:
        super().__init__(scenario, keeps_events)
        self._rng = self.generator("swarm")
        self.population = Population(self, self.arrive, self.kill, self.generator("population"))
        self._speed = 0.0  # of all that live, microbatches per second

    # --- running ------------------------------------------------------------------------------

    def run(self, tell: Callable[[float], None] = lambda minutes: None) -> None:
        """Run to the end; `tell` is called after each virtual minute."""
        run, queue = self.scenario.run, self.queue
        self._begin()
        self.population.begin()
        queue.at(self.measures.warm_up, self._count)
        self.start(self._watch(), None)
        end, minute = 60 * run.minutes, 60.0
        while minute < end:
            queue.run_until(minute)
            tell(minute / 60)
            minute += 60.0
        queue.run_until(end)
        for peer in self.alive.values():
            peer.device.note_idle_at_end()

    def _count(self) -> None:
        self.measures.counts = True

    # --- peers --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Add the peers of the beginning, as many in each stage; each kind's are spread over the stages."""
        place = 0
        for kind in self.scenario.peers:
            for _ in range(kind.count):
                peer = self._add(kind)
                stage = place % len(self.stages)
                place += 1
                self.queue.at(self._rng.uniform(0, STARTED_WITHIN), self._first, peer, stage)

    def _first(self, peer: SwarmPeer, stage: int) -> None:
        if peer.is_alive:
            self._knows_sizes(peer)
            peer.serve(stage, Opinion([self.scenario.run.seed, peer.number]))
            # once all have announced themselves: a look at an empty stage would say that it is small
            self.queue.after(STARTED_WITHIN, self.start, peer.discover(), peer)
            start_moving(peer)

    def _knows_sizes(self, peer: SwarmPeer) -> None:
        """Tell a peer the stages' sizes, as if it had been there before: no swarm begins with its scenario."""
        for stage in self.stages:
            replicas = self.scenario.count / len(self.stages)
            level = level_of(replicas, 0)
            peer.view.sizes[stage] = StageSize(replicas, level, {level: replicas})

    def _add(self, kind: PeerKind) -> SwarmPeer:
        number = len(self.peers)
        peer = SwarmPeer(self, number, kind, self.generator(f"peer {number}"))
        self.peers[peer.peer] = self.alive[peer.peer] = peer
        self._speed += peer.speed
        self.population.came(peer)
        return peer

    def arrive(self, kind: PeerKind) -> None:
        """Add a newcomer: it chooses a stage, downloads it and trains."""
        peer = self._add(kind)
        self.measures.log(self.now, "arrives", peer.peer)
        if self.network.cut_since is not None:
            peer.side = self._rng.randrange(2)
        self.start(Newcomer(peer).join(), peer)

    def kill(self, peer: SwarmPeer) -> None:
        """Let a peer vanish without a word."""
        self.measures.deaths += 1
        self._speed -= peer.speed
        del self.alive[peer.peer]
        peer.die()

    # --- watching -----------------------------------------------------------------------------

    def _watch(self) -> Iterator[float]:
        """Note the swarm once in each moment of the time-lapse."""
        yield BIN - 1e-6
        while True:
            moment, stages = self.measures.at(self.now), len(self.stages)
            moment.ideal = BIN * self._speed / stages
            for peer in self.alive.values():
                moment.ideal_by_side[peer.side] += BIN * peer.speed / stages
            moment.peers, moment.serving = len(self.alive), sum(self.serving)
            moment.spread = self._spread()
            if self.measures.counts:
                self.measures.peer_minutes += len(self.alive) * BIN / 60
                self._look_at_views()
            yield BIN

    def _spread(self) -> float | None:
        """Spread by what the theory expects of it, mean over the stages with three replicas and more."""
        by_stage: list[list[Opinion]] = [[] for _ in self.stages]
        for peer in self.alive.values():
            if peer.serves and peer.rounds is not None and len(by_stage[peer.stage]) < SPREAD_SAMPLE:
                by_stage[peer.stage].append(peer.rounds.opinion)
        ratios = [
            spread_of(opinions) / expected_spread(self.serving[stage])
            for stage, opinions in enumerate(by_stage)
            if len(opinions) > 2
        ]
        return sum(ratios) / len(ratios) if ratios else None

    def _look_at_views(self) -> None:
        """Count the members of views that are dead for longer than a record lives and a look takes."""
        overdue = self.now - 1.5 * self.scenario.run.record_lifetime
        living = list(self.alive.values())
        for peer in self._rng.sample(living, min(LOOKED_AT, len(living))):
            for stage in (peer.stage, peer.stage + 1):
                members = peer.view.members(stage, self.now)
                self.measures.known += len(members)
                self.measures.overdue_known += sum(self.peers[m.peer].died < overdue for m in members)


def simulate_swarm(
    scenario: SwarmScenario, keeps_events: bool = False, tell: Callable[[float], None] | None = None
) -> SwarmWorld:
    """Run a simulated swarm to its end.

    Meanwhile nothing looks for cycles of objects: a simulation leaves next to none among its millions.
    """
    world, collects = SwarmWorld(scenario, keeps_events), gc.isenabled()
    gc.disable()
    try:
        world.run(tell or (lambda minutes: None))
    finally:
        if collects:
            gc.enable()
    return world
