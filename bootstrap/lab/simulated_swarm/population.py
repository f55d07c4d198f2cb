"""The comings and goings of a simulated swarm: spot preemption, days and nights, exits, crowds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from bootstrap.lab.simulated_swarm.swarm_peer import SwarmPeer
from bootstrap.lab.simulated_swarm.swarm_scenario import PeerKind, SwarmChange
from bootstrap.lab.simulated_swarm.swarm_space import SwarmSpace

LOOKED_EVERY = 30.0  # seconds, at how many of a kind should be there by the time of day


class Population:
    """Plans arrivals and departures. Mutable state: its random numbers."""

    def __init__(
        self,
        world: SwarmSpace[SwarmPeer],
        arrive: Callable[[PeerKind], None],
        kill: Callable[[SwarmPeer], None],
        rng: random.Random,
    ) -> None:
        """`arrive` adds a newcomer, `kill` lets a peer vanish."""
        self._world = world
        self._arrive = arrive
        self._kill = kill
        self._rng = rng

    def begin(self) -> None:
        world, scenario = self._world, self._world.scenario
        for change in scenario.changes:
            world.queue.at(60 * change.minute, self._change, change)
        for kind in scenario.peers:
            if kind.presence == "diurnal":
                world.start(self._days(kind), None)
        for partition in scenario.network.partitions:
            world.queue.at(60 * partition.minute, self._cut, partition.share)
            world.queue.at(60 * (partition.minute + partition.minutes), self._heal)

    def came(self, peer: SwarmPeer) -> None:
        """Plan when a peer that has come is preempted, if it is."""
        rate = peer.kind.preempted / 60
        if rate:
            self._world.queue.after(self._rng.expovariate(rate), self._preempt, peer)

    def _preempt(self, peer: SwarmPeer) -> None:
        if peer.is_alive:
            self._kill(peer)
            if peer.kind.replaced:
                self._arrive(peer.kind)

    def _change(self, change: SwarmChange) -> None:
        world = self._world
        there = [peer for peer in world.alive.values() if peer.is_alive]
        count = round(change.share * len(there))
        if change.what == "exit":
            for peer in self._rng.sample(there, count):
                world.queue.after(self._rng.uniform(0, 60 * change.within), self._exit, peer)
            return
        weights = [kind.count for kind in world.scenario.peers]
        for kind in self._rng.choices(world.scenario.peers, weights, k=count):
            world.queue.after(self._rng.uniform(0, 60 * change.within), self._arrive, kind)

    def _exit(self, peer: SwarmPeer) -> None:
        if peer.is_alive:
            self._kill(peer)

    def _days(self, kind: PeerKind) -> Iterator[float]:
        world = self._world
        while True:
            wanted = round(kind.count * (0.75 + 0.25 * math.cos(2 * math.pi * world.now / (60 * kind.day))))
            there = [peer for peer in world.alive.values() if peer.kind is kind]
            for peer in self._rng.sample(there, max(0, len(there) - wanted)):
                self._kill(peer)
            for _ in range(wanted - len(there)):
                self._arrive(kind)
            yield LOOKED_EVERY

    def _cut(self, share: float) -> None:
        world = self._world
        for peer in world.alive.values():
            peer.side = int(self._rng.random() < share)
        world.network.cut_since = world.now
        world.measures.log(world.now, "cut", "")
        for peer in world.alive.values():
            for pipeline in peer.pipelines.values():
                pipeline.cut_off()

    def _heal(self) -> None:
        self._world.network.cut_since = None
        self._world.measures.log(self._world.now, "healed", "")
