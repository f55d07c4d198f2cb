"""The default search: simulated annealing on the true cost.

It tries single changes, thousands in a row in compiled code (`anneal_dtfm`, `anneal_noloco`), and accepts a worse
placement with probability exp(−Δ/temperature). Equal cost is always accepted, so it drifts over the plateaus that
equal links make. The temperature falls geometrically while a share of the budget is spent, then the next run
starts from another random placement.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bootstrap.placement.search import Found, Meter, Problem

RUNS = 2
# of a random placement's cost; measured on the three scenarios of tests/data and perturbed copies (docs/placement.md)
HOT, COLD = 0.04, 0.0004
DRAWN = 20  # random placements for the scale of costs
CHUNK_SECONDS = 0.02
CHUNKS = 200  # of one budget at least


def anneal(problem: Problem, meter: Meter, generator: np.random.Generator) -> Iterator[Found]:
    """`RUNS` runs, each over its share of the budget."""
    scale = np.inf
    for _ in range(meter.at_most(DRAWN)):
        placement = problem.drawn(generator)
        found = Found(placement, problem.cost(placement))
        scale = min(scale, found.cost)
        yield found
    for run in range(RUNS):
        walker = problem.annealer(problem.drawn(generator), generator)
        begun, steps = meter.spent(), 50
        end = begun + (1 - begun) / (RUNS - run)
        while (spent := meter.spent()) < end:
            temperature = scale * HOT * (COLD / HOT) ** ((spent - begun) / (end - begun))
            since, steps = meter.seconds, meter.at_most(steps)
            walker.walk(temperature, steps)
            yield Found(walker.best, walker.least, steps)
            steps = chunk(steps, meter, meter.seconds - since)


def chunk(steps: int, meter: Meter, took: float) -> int:
    """How many steps next: many enough for the loop around them not to matter, few enough for a smooth schedule."""
    if meter.budget.seconds is None:
        return max(1, (meter.budget.evaluations or 0) // (CHUNKS * RUNS))
    longest = min(CHUNK_SECONDS, meter.budget.seconds / (CHUNKS * RUNS))
    return max(1, min(2 * steps, int(steps * longest / max(took, 1e-9))))
