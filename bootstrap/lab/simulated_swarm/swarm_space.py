"""The surroundings that all peers of a simulated swarm share: clock, links, DHT and counts, and the peers in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from bootstrap.lab.simulated_swarm.event_queue import EventQueue
from bootstrap.lab.simulated_swarm.modelled_dht import ModelledDht
from bootstrap.lab.simulated_swarm.modelled_network import ModelledNetwork
from bootstrap.lab.simulated_swarm.swarm_measures import SwarmMeasures
from bootstrap.lab.simulated_swarm.swarm_scenario import SwarmScenario
from protocol.ground import PeerId

Inhabitant = TypeVar("Inhabitant", covariant=True)


class Mortal(Protocol):
    """A peer that may end while its processes wait."""

    is_alive: bool


class SwarmSpace(Generic[Inhabitant]):
    """The surroundings of simulated peers. Each part of a peer names what it needs of the others as `Inhabitant`.

    Mutable state: all peers that ever were, those that live, and how many serve each stage.
    """

    def __init__(self, scenario: SwarmScenario, keeps_events: bool = False) -> None:
        run = scenario.run
        self.scenario = scenario
        self.queue = EventQueue()
        self.measures = SwarmMeasures(60 * run.warm_up, keeps_events)
        self.network = ModelledNetwork(self.queue, scenario.network, self.measures, self.generator("network"))
        self.dht = ModelledDht(self.queue, self.network, self.generator("dht"), scenario.network.loss)
        self.stages = list(range(run.stages))
        self.work = [1.0] * run.stages
        self.regions = [region.share for region in scenario.network.regions]
        self.serving = [0] * run.stages
        self.peers: dict[PeerId, Inhabitant] = {}
        self.alive: dict[PeerId, Inhabitant] = {}

    @property
    def now(self) -> float:
        return self.queue.now

    def generator(self, name: str) -> random.Random:
        """Return the random numbers of one part of the swarm, which no other part draws from."""
        return random.Random(f"{self.scenario.run.seed}/{name}")

    def start(self, process: Iterator[float], peer: Mortal | None) -> None:
        """Run a process that yields the seconds to wait, until it or the peer ends."""

        def go_on() -> None:
            if peer is None or peer.is_alive:
                seconds = next(process, None)
                if seconds is not None:
                    self.queue.after(seconds, go_on)

        go_on()
