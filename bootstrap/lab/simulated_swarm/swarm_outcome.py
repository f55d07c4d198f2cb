"""The outcome of a simulated swarm, in numbers that people compare, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bootstrap.lab.simulated_swarm.swarm_measures import BIN, Moment
from bootstrap.lab.simulated_swarm.swarm_world import SwarmWorld


def quantile(values: Sequence[float], share: float) -> float | None:
    """Quantile of sorted or unsorted values; None without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def throughput_of(moments: Sequence[Moment], side: int | None = None) -> float | None:
    """Microbatches done, as a share of what the peers present could do at best; of one side of a cut network."""
    done = sum(m.done if side is None else m.done_by_side[side] for m in moments)
    ideal = sum(m.ideal if side is None else m.ideal_by_side[side] for m in moments)
    return done / ideal if ideal else None


@dataclass(frozen=True)
class SwarmOutcome:
    """The outcome of a simulation, in the time after the warm-up. None: there was nothing of the kind."""

    scenario: str
    seed: int
    peers: int  # at the end
    minutes: float
    throughput: float | None  # by the ideal of the peers present
    idle: dict[str, float]  # share of the peers' time, by cause
    pairing_median: float | None  # round trips from the first proposal of a round to the agreement
    pairing_p95: float | None
    rounds: int
    alone: float | None  # share of the rounds, without those of an uneven number's one
    proposals: (
        float | None
    )  # deviations by which the replica that is asked most is above the mean of its stage
    again: float | None  # partners met twice in a row, by what chance gives
    connected: float | None  # through pairs, of a stage's replicas at the end; the least of the stages
    imbalance: (
        float | None
    )  # most over mean of a stage, windows of 100 microbatches a replica, mean over windows
    resends: float  # a microbatch and stage
    refusals: float
    bytes: dict[str, float]  # a peer and minute, by purpose
    useful_after: float | None  # seconds, median
    useful_p95: float | None
    overdue: float | None  # share of the members of views that died long ago
    moves: int
    deaths: int
    spread: float | None  # at the end, by the theory's
    digest: str  # of the event log

    @classmethod
    def of(cls, world: SwarmWorld) -> SwarmOutcome:
        measures, run = world.measures, world.scenario.run
        moments = counted(world)
        seconds = 60 * measures.peer_minutes or math.inf
        # a round needs at least one of its kind to say something of chance
        expected = measures.expected_again
        spreads = [moment.spread for moment in moments[-6:] if moment.spread is not None]
        offers = max(1, measures.offers)
        return cls(
            scenario=world.scenario.name,
            seed=run.seed,
            peers=len(world.alive),
            minutes=run.minutes,
            throughput=throughput_of(moments),
            idle={cause: idle / seconds for cause, idle in sorted(measures.idle.items())},
            pairing_median=median(measures.pairing_trips) if measures.pairing_trips else None,
            pairing_p95=quantile(measures.pairing_trips, 0.95),
            rounds=measures.rounds,
            alone=measures.alone / measures.rounds if measures.rounds else None,
            proposals=_most_asked(world),
            again=measures.partners_again / expected if expected else None,
            connected=_connected(world),
            imbalance=fmean(measures.imbalance) if measures.imbalance else None,
            resends=measures.resends / offers,
            refusals=measures.refusals / offers,
            bytes={purpose: nbytes / (seconds / 60) for purpose, nbytes in sorted(measures.bytes.items())},
            useful_after=median(measures.useful_after) if measures.useful_after else None,
            useful_p95=quantile(measures.useful_after, 0.95),
            overdue=measures.overdue_known / measures.known if measures.known else None,
            moves=measures.moves,
            deaths=measures.deaths,
            spread=fmean(spreads) if spreads else None,
            digest=measures.digest,
        )


def _most_asked(world: SwarmWorld) -> float | None:
    """The most asked replica's excess, in standard deviations of such a count; the largest over the stages."""
    above = []
    for stage, asked in world.measures.proposals.items():
        mean = asked.total() / max(1, world.serving[stage])
        above.append((max(asked.values()) - mean) / math.sqrt(mean))
    return max(above, default=None)


def _connected(world: SwarmWorld) -> float | None:
    stages: dict[int, list[str]] = {}
    for peer in world.alive.values():
        if peer.serves and peer.steps >= world.scenario.run.inner_steps:  # it has had a round
            stages.setdefault(peer.stage, []).append(peer.peer)
    shares = [world.measures.connected(peers) for peers in stages.values() if len(peers) > 1]
    return min((share for share in shares if share is not None), default=None)


def counted(world: SwarmWorld) -> list[Moment]:
    """The moments after the warm-up."""
    return between(world, world.measures.warm_up, math.inf)


def between(world: SwarmWorld, begin: float, end: float) -> list[Moment]:
    """The moments that lie within, in seconds."""
    return [
        moment
        for place, moment in sorted(world.measures.moments.items())
        if moment.peers and begin <= place * BIN and (place + 1) * BIN <= end
    ]
