"""One way to run every search: a budget, a seed, and the best plan so far at any time.

A method is a generator of evaluated placements. The driver draws from it, keeps the best, and stops when the budget
is spent; so a method holds neither a clock nor a best of its own, and can be stopped anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bootstrap.lab.placement.dtfm import DtfmProblem
from bootstrap.lab.placement.kernels import Integers
from bootstrap.lab.placement.noloco import NolocoProblem

Problem = DtfmProblem | NolocoProblem  # placements of N devices in S stages, and their cost


@dataclass(frozen=True)
class Found:
    """A placement (the stage of each device [N]), its cost in seconds, and the evaluations that it took."""

    stage_of: Integers
    cost: float
    evaluations: int = 1


@dataclass(frozen=True)
class Budget:
    """A limit in seconds, in evaluations or in both, whichever is reached first."""

    seconds: float | None = None
    evaluations: int | None = None


class BudgetMeter:
    """A meter of how much of a budget is spent. The clock gives seconds."""

    def __init__(self, budget: Budget, clock: Callable[[], float]) -> None:
        self.budget = budget
        self.evaluations = 0
        self._clock, self._start = clock, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def spent(self) -> float:
        """The fraction of the budget that is spent; 1 or more when it is used up."""
        by_time = self.seconds / self.budget.seconds if self.budget.seconds else 0.0
        by_count = self.evaluations / self.budget.evaluations if self.budget.evaluations else 0.0
        return max(by_time, by_count)

    def at_most(self, evaluations: int) -> int:
        """`evaluations`, or as many as are left; at least 1."""
        if self.budget.evaluations is None:
            return evaluations
        return max(1, min(evaluations, self.budget.evaluations - self.evaluations))


Method = Callable[[Problem, BudgetMeter, np.random.Generator], Iterator[Found]]


@dataclass(frozen=True)
class Improvement:
    """The best so far: when, after how many evaluations, at what cost. `spent`: fraction of the budget."""

    seconds: float
    evaluations: int
    cost: float
    spent: float


@dataclass(frozen=True)
class SearchResult:
    """The best placement of a search, and each improvement on the way to it."""

    stage_of: Integers
    cost: float
    seconds: float
    evaluations: int
    history: tuple[Improvement, ...]


def run_search(
    problem: Problem,
    method: Method,
    budget: Budget,
    seed: int,
    *,
    progress: Callable[[Improvement], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SearchResult:
    """Runs `method` until `budget` is spent; one placement is evaluated whatever the budget.

    With a budget of evaluations alone the same seed gives the same outcome. Ctrl-C ends the search early with what
    it has, unless that is nothing.
    """
    meter = BudgetMeter(budget, clock)
    best: Found | None = None
    history: list[Improvement] = []
    try:
        for found in method(problem, meter, np.random.default_rng(seed)):
            meter.evaluations += found.evaluations
            improved = best is None or found.cost < best.cost
            if best is None or improved:
                best = found
            sighting = Improvement(meter.seconds, meter.evaluations, best.cost, meter.spent())
            if improved:
                history.append(sighting)
            if progress is not None:
                progress(sighting)
            if sighting.spent >= 1:
                break
    except KeyboardInterrupt:
        if best is None:
            raise
    assert best is not None, "a method evaluates at least one placement"
    return SearchResult(best.stage_of.copy(), best.cost, meter.seconds, meter.evaluations, tuple(history))
