"""Bounds that a simulated swarm has to keep. Each check has a name, what was found and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome, between, throughput_of
from bootstrap.lab.simulated_swarm.swarm_scenario import SwarmScenario
from bootstrap.lab.simulated_swarm.swarm_world import SwarmWorld

CHURN_THROUGHPUT = 0.85
SLOW_THROUGHPUT = 0.9
RECOVERED = 120.0  # seconds after an exit
SLOWER = 0.9  # of what they did before: those who train while a crowd comes
SIDE_TRAINS = 0.5  # of its ideal: half of a cut network
SPREAD_BAND = (0.5, 1.5)  # by the theory's
PAIRING_MEDIAN, PAIRING_P95, ALONE = 2.0, 20.0, 0.01
# In a stage of fewer replicas than so many more rounds are alone: of four that are out of step, two that pair leave
# two that cannot.
MANY, ALONE_OF_FEW = 8, 0.03
MOST_AGAIN = 2.0  # times what chance gives; with `ENOUGH_AGAIN` standard deviations
ENOUGH_AGAIN = 3.0
ENOUGH_ROUNDS = 2  # of each peer: after one a stage is pairs that have met nobody else
IMBALANCE = 1.5  # most over mean of equals, 100 microbatches a replica: 3 to 4 deviations of a Poisson count
MOST_ASKED = 6.0  # standard deviations above the mean, of proposals
OVERDUE = 0.001
BEFORE = 300.0  # seconds before a change that it is held against


@dataclass(frozen=True)
class SwarmCheck:
    name: str
    found: float | None
    bound: str
    holds: bool

    @property
    def sentence(self) -> str:
        found = "nothing was measured" if self.found is None else f"{self.found:.3g}"
        return f"{self.name}: {found}, allowed is {self.bound}."


def most(name: str, found: float | None, bound: float) -> SwarmCheck:
    return SwarmCheck(name, found, f"at most {bound:g}", found is not None and found <= bound)


def least(name: str, found: float | None, bound: float) -> SwarmCheck:
    return SwarmCheck(name, found, f"at least {bound:g}", found is not None and found >= bound)


def within(name: str, found: float | None, band: tuple[float, float]) -> SwarmCheck:
    low, high = band
    return SwarmCheck(name, found, f"from {low:g} to {high:g}", found is not None and low <= found <= high)


def checks_of(world: SwarmWorld, outcome: SwarmOutcome) -> list[SwarmCheck]:
    """The checks that the scenario calls for."""
    scenario = world.scenario
    return [
        *_of_pairing(world, outcome),
        *_of_routing(scenario, outcome),
        *_of_views(outcome),
        *_of_churn(scenario, outcome),
        *_of_changes(world),
        *_of_partitions(world, outcome),
    ]


def _is_steady(scenario: SwarmScenario) -> bool:
    """Return whether nobody comes or goes, and nothing is cut."""
    comes = any(kind.preempted or kind.presence != "constant" for kind in scenario.peers)
    return not (comes or scenario.changes or scenario.network.partitions)


def _has_equals(scenario: SwarmScenario) -> bool:
    speeds = [kind.speed for kind in scenario.peers if kind.count]
    return max(speeds) <= 1.01 * min(speeds)


def _of_pairing(world: SwarmWorld, outcome: SwarmOutcome) -> Iterator[SwarmCheck]:
    scenario = world.scenario
    if not _is_steady(scenario) or not outcome.rounds:
        return
    if _has_equals(scenario):
        yield most("pairing, median in round trips", outcome.pairing_median, PAIRING_MEDIAN)
        yield most("pairing, 95th percentile in round trips", outcome.pairing_p95, PAIRING_P95)
        few = scenario.count < MANY * scenario.run.stages
        yield most("rounds alone", outcome.alone, ALONE_OF_FEW if few else ALONE)
    yield most("proposals to one replica, deviations above the mean", outcome.proposals, MOST_ASKED)
    expected = world.measures.expected_again
    chance = 1 + ENOUGH_AGAIN / math.sqrt(max(1.0, expected / 2))  # pairs are counted from both ends
    yield most("partners met again, by chance", outcome.again, max(MOST_AGAIN, chance))
    if outcome.rounds >= ENOUGH_ROUNDS * scenario.count:
        yield least("replicas of a stage that are connected through pairs", outcome.connected, 1.0)


def _of_routing(scenario: SwarmScenario, outcome: SwarmOutcome) -> Iterator[SwarmCheck]:
    if scenario.run.stages > 1 and _is_steady(scenario) and _has_equals(scenario) and outcome.imbalance:
        yield most("routing, most over mean", outcome.imbalance, IMBALANCE)
    if len(scenario.peers) > 1 and _is_steady(scenario):
        yield least("throughput by the sum of speeds", outcome.throughput, SLOW_THROUGHPUT)


def _of_views(outcome: SwarmOutcome) -> Iterator[SwarmCheck]:
    if outcome.deaths and outcome.overdue is not None:
        yield most("dead members that views still hold", outcome.overdue, OVERDUE)


def _of_churn(scenario: SwarmScenario, outcome: SwarmOutcome) -> Iterator[SwarmCheck]:
    if any(kind.preempted for kind in scenario.peers):
        yield least("throughput by the ideal", outcome.throughput, CHURN_THROUGHPUT)


def _of_changes(world: SwarmWorld) -> Iterator[SwarmCheck]:
    for change in world.scenario.changes:
        at, over = 60 * change.minute, 60 * (change.minute + change.within)
        if change.what == "exit":
            after = between(world, over + RECOVERED, over + 3 * RECOVERED)
            yield least("throughput two minutes after the exit", throughput_of(after), CHURN_THROUGHPUT)
        else:
            yield least("rate of those who trained already", _kept_up(world, at, over), SLOWER)


def _kept_up(world: SwarmWorld, at: float, over: float) -> float | None:
    """The rate from `at` on of those who trained before, as a share of their rate until then."""
    before = between(world, max(world.measures.warm_up, at - BEFORE), at)
    after = between(world, at, over + BEFORE)
    if not before or not after:
        return None
    was, then = (fmean(moment.done_by_first for moment in moments) for moments in (before, after))
    return then / was if was else None


def _of_partitions(world: SwarmWorld, outcome: SwarmOutcome) -> Iterator[SwarmCheck]:
    for partition in world.scenario.network.partitions:
        begin, end = 60 * partition.minute, 60 * (partition.minute + partition.minutes)
        during = between(world, begin + RECOVERED, end)
        for side, name in enumerate(("the rest", "the share")):
            yield least(f"throughput of {name} while cut off", throughput_of(during, side), SIDE_TRAINS)
        yield within("spread at the end, by the theory's", outcome.spread, SPREAD_BAND)
        after = between(world, end + RECOVERED, math.inf)
        yield least("throughput after the partition", throughput_of(after), _steady(world, begin))


def _steady(world: SwarmWorld, begin: float) -> float:
    """Nine tenths of the throughput before."""
    return round(0.9 * (throughput_of(between(world, world.measures.warm_up, begin)) or 0.0), 3)


def broken(checks: list[SwarmCheck]) -> list[SwarmCheck]:
    return [check for check in checks if not check.holds]
