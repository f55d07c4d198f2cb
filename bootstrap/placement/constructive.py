"""The two simplest searches, random placements and stages filled with near neighbours, and the order of stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from bootstrap.placement.search import BudgetMeter, Found, Integers, Problem


def random_placements(
    problem: Problem, meter: BudgetMeter, generator: np.random.Generator
) -> Iterator[Found]:
    """Random placements, one after the other."""
    while True:
        placement = problem.drawn(generator)
        yield Found(placement, problem.cost(placement))


def greedy(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """Fills stage after stage with the devices nearest to those already in it, from ever other first devices."""
    while True:
        # a random placement says what is allowed: the sizes of its groups are kept
        sizes = np.bincount(problem.drawn(generator), minlength=problem.stages)
        placement = near_neighbours(problem, sizes, generator)
        yield Found(placement, problem.cost(placement))


def near_neighbours(problem: Problem, sizes: Integers, generator: np.random.Generator) -> Integers:
    """Stages of `sizes` [S]; of equally near devices any."""
    count = len(problem.weights)
    stage_of = np.full(count, -1)
    for stage, size in enumerate(sizes):
        distance = generator.random(count) * 1e-9  # breaks ties at random
        for _ in range(size):
            free = np.flatnonzero(stage_of < 0)
            chosen = free[np.argmin(distance[free])]
            stage_of[chosen] = stage
            distance += problem.weights[chosen]
    return stage_of


def ordered(problem: Problem, found: Iterator[Found]) -> Iterator[Found]:
    """What another search finds, with its stages brought into the best order nearby where that matters."""
    for one in found:
        yield one
        if problem.order_matters:
            yield in_best_order(problem, one)


def in_best_order(problem: Problem, found: Found) -> Found:
    """The same groups in a better order, from change to change for as long as one helps."""
    order, best, evaluations = list(range(problem.stages)), found, 0
    improved = True
    while improved:
        improved = False
        for trial in list(neighbours(order)):
            stage_of = np.argsort(trial)[found.stage_of]
            cost = problem.cost(stage_of)
            evaluations += 1
            if cost < best.cost:
                order, best, improved = trial, Found(stage_of, cost), True
    return Found(best.stage_of, best.cost, evaluations)


def neighbours(order: list[int]) -> Iterator[list[int]]:
    """Orders in which two change places, those from one to another turn round, or one moves elsewhere."""
    for first, last in combinations(range(len(order)), 2):
        before, between, after = order[:first], order[first : last + 1], order[last + 1 :]
        yield [*before, *between[::-1], *after]
        yield [*before, between[-1], *between[1:-1], between[0], *after]
        yield [*before, *between[1:], between[0], *after]
        yield [*before, between[-1], *between[:-1], *after]
