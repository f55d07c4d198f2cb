"""The two simplest searches: random placements, and stages filled with near neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bootstrap.placement.search import Found, Integers, Meter, Problem


def random_placements(problem: Problem, meter: Meter, generator: np.random.Generator) -> Iterator[Found]:
    """Random placements, one after the other."""
    while True:
        placement = problem.drawn(generator)
        yield Found(placement, problem.cost(placement))


def greedy(problem: Problem, meter: Meter, generator: np.random.Generator) -> Iterator[Found]:
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
