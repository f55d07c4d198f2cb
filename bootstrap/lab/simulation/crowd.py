"""The peers of a trial, some of which do wrong, and what the honest ones find out about them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from bootstrap.lab.simulation.liars import LIES, FlippedLabels, Lie
from bootstrap.lab.simulation.lying_network import LyingRpc
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.replica import Replica

# the events by which a peer says that it leaves another alone, and the field that names that one
SET_ASIDE: Mapping[str, str] = {
    "quarantined": "partner",
    "wrong-answers": "peer",
    "left-alone": "peer",
    "odd-losses": "peer",
    "held": "peer",
}
ENOUGH = 0.5  # of the honest peers of a stage that deals with an attacker


@dataclass(frozen=True)
class Findings:
    """What honest peers found out: see `LearningResult`."""

    found: float | None
    found_after: float | None
    blamed: int


class Crowd:
    """Adds peers to a swarm, the last of each stage as attackers of one kind. Mutable state: who these are."""

    def __init__(self, swarm: SimulatedSwarm, attack: str, share: float) -> None:
        """`share` of the replicas of each stage where that kind sits attack; none with an `attack` that is empty."""
        self._swarm = swarm
        self._lie: Lie | None = LIES[attack] if attack else None
        self._share = share
        self.attackers: dict[int, int] = {}  # number -> stage

    def add(self, number: int, replicas: int, **settings: Any) -> None:
        """Start peer `number` of `replicas` in each stage."""
        stages, lie = self._swarm.manifest.stages, self._lie
        row, stage = divmod(number, stages)
        if lie is None or not lie.sits_in(stage, stages) or row < replicas - round(self._share * replicas):
            self._swarm.add(number, stage=stage, **settings)
            return
        self.attackers[number] = stage
        corpus: Any = FlippedLabels(self._swarm.corpus) if lie.flips_labels else None
        made = lie.replica(self._honest, number)
        self._swarm.add(
            number, stage=stage, replica=made, corpus=corpus, rpc=lie.rpc, transport=lie.transport, **settings
        )

    def _honest(self, stage: int) -> list[Replica]:
        nodes = self._swarm.nodes
        return [
            nodes[number].replica
            for number in sorted(nodes)
            if number % self._swarm.manifest.stages == stage
            and number not in self.attackers
            and hasattr(nodes[number], "replica")
        ]

    def findings(self) -> Findings:
        """What the events of the swarm say, once it is over."""
        number_of = {node.context.me: number for number, node in self._swarm.nodes.items()}
        accusers = defaultdict[int, dict[int, float]](dict)  # accused -> accuser -> when first
        for event in self._swarm.events:
            if event["event"] in SET_ASIDE and event["node"] not in self.attackers:
                accused = number_of.get(event[SET_ASIDE[event["event"]]])
                if accused is not None:
                    accusers[accused].setdefault(event["node"], event["time"])
        if not self.attackers:
            return Findings(None, None, len(accusers))
        delays = [self._found_after(number, accusers[number]) for number in self.attackers]
        known = [delay for delay in delays if delay is not None]
        return Findings(
            found=len(known) / len(delays),
            found_after=median(known) if known else None,
            blamed=len(accusers.keys() - self.attackers.keys()),
        )

    def _found_after(self, attacker: int, accusers: Mapping[int, float]) -> float | None:
        """Microbatches of the attacker's inner steps when enough of a stage knew, or its lies, if it counts them.

        None when they never knew.
        """
        known = [self._known_to(stage, accusers) for stage in range(self._swarm.manifest.stages)]
        since = min(known)
        if math.isinf(since):
            return None
        rpc = self._swarm.nodes[attacker].rpc
        if isinstance(rpc, LyingRpc):
            return float(sum(time <= since for time in rpc.lied))
        steps = sum(
            event["event"] == "step" and event["node"] == attacker and event["time"] <= since
            for event in self._swarm.events
        )
        return float(steps * self._swarm.manifest.inner.microbatches)

    def _known_to(self, stage: int, accusers: Mapping[int, float]) -> float:
        """When enough of the honest of a stage had accused; infinite when they never did."""
        enough = max(1, round(ENOUGH * len(self._honest(stage))))
        times = sorted(
            time for number, time in accusers.items() if number % self._swarm.manifest.stages == stage
        )
        return times[enough - 1] if len(times) >= enough else math.inf
