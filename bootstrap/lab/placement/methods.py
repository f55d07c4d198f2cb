"""The searches for a placement, each a generator that `bootstrap.lab.placement.search` runs.

The default is simulated annealing on the true cost. It tries single changes, thousands in a row in compiled code,
and accepts a worse placement with probability exp(−Δ/temperature). Equal cost is always accepted, so it drifts over
the plateaus that equal links make.

Where all placements are few they are all tried, and that is the end. Else a budget goes to these in turn:
placements built from what stands close together, machines within a stage and machines across stages (`starts`);
greedy placements, whose stages are then put in order; DT-FM's genetic algorithm (which is done within seconds when
links are regular); a hot run among clusters if there are many devices; a hot run from a random placement, and a warm
one from the best so far. With hundreds of devices, or where a few slow ones decide, the hot run alone does not find a
placement as good as those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, combinations, islice
from operator import attrgetter

import numpy as np

from bootstrap.lab.placement.chains import improve
from bootstrap.lab.placement.dtfm import DtfmProblem
from bootstrap.lab.placement.kernels import Integers
from bootstrap.lab.placement.noloco import NolocoProblem
from bootstrap.lab.placement.search import BudgetMeter, Found, Method, Problem
from bootstrap.lab.placement.starts import ENUMERATED, built, enumerated

# of a random placement's cost; tried on the scenarios of tests/data and perturbed copies (docs/placement.md)
HOT, WARM, COLD = 0.05, 0.01, 0.0002
GAINED = 0.1  # of what is gained over random placements: the warm run is not to lose more
# A built placement is a local minimum that a warm run hardly leaves; the others', a few per cent worse, end lower.
CLEARLY = 0.95
DRAWN = 20  # random placements, for the scale of costs
# of the budget: for greedy placements, and as much at most for built ones; for breeding; and when the runs end
GREEDY, BRED, CLUSTERED, HOT_RUN = 0.03, 0.07, 0.45, 0.55
AMONG_CLUSTERS = 0.7  # with a thousand devices, for the whole search among clusters
CHUNK_SECONDS = 0.02
CHUNKS = 400  # at least, of a budget

POPULATION = 100
CROSSED = 5  # devices whose groups come from the other parent

by_cost = attrgetter("cost")


def anneal(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """All placements where these are few; else `search_parts`, with a thousand devices among clusters first."""
    if (everything := enumerated(problem, meter.at_most(ENUMERATED))) is not None:
        yield from (Found(placement, problem.cost(placement)) for placement in everything)
    elif isinstance(problem, NolocoProblem) and (made := problem.coarse(generator)) is not None:
        yield from inside_out(problem, *made, meter, generator)
    else:
        yield from search_parts(problem, meter, generator, 1.0)


def inside_out(
    problem: Problem, coarse: Problem, members: Integers, meter: BudgetMeter, generator: np.random.Generator
) -> Iterator[Found]:
    """The whole search among clusters, which the fast links of a region make, then a warm run among devices."""
    first = problem.drawn(generator)
    best, least = Found(first, problem.cost(first)), np.inf
    scale = best.cost
    yield best
    for among in search_parts(coarse, meter, generator, AMONG_CLUSTERS):
        if among.cost < least:  # costs of clusters are near those of devices, and much faster to get
            least, stage_of = among.cost, lifted(among.stage_of, members)
            best = min(best, Found(stage_of, problem.cost(stage_of)), key=by_cost)
        yield Found(best.stage_of, best.cost, among.evaluations)
    yield from cooled(problem, best, *warmth(scale, best), 1.0, meter, generator)


def search_parts(
    problem: Problem, meter: BudgetMeter, generator: np.random.Generator, end: float
) -> Iterator[Found]:
    """Built and greedy placements, DT-FM's algorithm, a hot run, a warm one, until that fraction is spent."""
    seen = list(islice(random_placements(problem, meter, generator), meter.at_most(DRAWN)))
    yield from seen
    best = min(seen, key=by_cost)
    scale = best.cost
    constructed = best
    # the more devices, the less the runs find
    share = end * min(0.25, GREEDY * max(1.0, (best.stage_of.size / 64) ** 2))
    for found in spending(share, ordered(problem, built(problem, generator.spawn(1)[0])), meter):
        constructed = min(constructed, found, key=by_cost)
        yield found
    for found in chain(
        spending(share, ordered(problem, greedy(problem, meter, generator)), meter),
        spending(BRED * end, genetic(problem, meter, generator), meter),
        clustered(problem, scale, meter, generator),
        cooled(problem, seen[-1], HOT * scale, COLD * scale, HOT_RUN * end, meter, generator),
    ):
        best = min(best, found, key=by_cost)
        yield found
    start = constructed if constructed.cost < CLEARLY * best.cost else best
    yield from cooled(problem, start, *warmth(scale, start), end, meter, generator)


def warmth(scale: float, start: Found) -> tuple[float, float]:
    """The temperatures of a warm run; where all placements cost nearly the same, what was gained is the scale."""
    warm = max(min(WARM * scale, GAINED * (scale - start.cost)), 1e-9 * scale)
    return warm, min(COLD * scale, warm / 10)


def clustered(
    problem: Problem, scale: float, meter: BudgetMeter, generator: np.random.Generator
) -> Iterator[Found]:
    """Run hot among clusters, for DT-FM's cost where devices are many; what that finds counts by its true cost."""
    if not isinstance(problem, DtfmProblem) or (made := problem.coarse(generator)) is None:
        return
    coarse, members = made
    start = Found(coarse.drawn(generator), np.inf)
    for among in cooled(coarse, start, HOT * scale, COLD * scale, CLUSTERED, meter, generator):
        stage_of = lifted(among.stage_of, members)
        yield Found(stage_of, problem.cost(stage_of), among.evaluations)


def lifted(stage_of: Integers, members: Integers) -> Integers:
    """The stage of each device [N] from that of its cluster [C], whose devices are `members` [C, m]."""
    stages = np.empty(members.size, np.int64)
    stages[members] = stage_of[:, None]
    return stages


def spending(share: float, method: Iterator[Found], meter: BudgetMeter) -> Iterator[Found]:
    """Yield what `method` finds until that fraction of the budget is spent on it."""
    end = meter.spent() + share
    while meter.spent() < end and (found := next(method, None)) is not None:
        yield found


def cooled(
    problem: Problem,
    start: Found,
    hot: float,
    cold: float,
    end: float,
    meter: BudgetMeter,
    generator: np.random.Generator,
) -> Iterator[Found]:
    """One run from `start` until the fraction `end` of the budget is spent; it cools from hot to cold."""
    state = problem.state(start.stage_of)
    best, least = state.copy(), np.inf
    begun, steps = meter.spent(), 50
    while (spent := meter.spent()) < end:
        temperature = hot * (cold / hot) ** ((spent - begun) / (end - begun))
        since, steps = meter.seconds, meter.at_most(steps)
        if problem.stages > 1:  # or there is one placement
            least = problem.walk(state, best, least, temperature, steps, generator)
        yield Found(problem.placement(best), least, steps)
        steps = chunk(steps, meter, meter.seconds - since)


def chunk(steps: int, meter: BudgetMeter, took: float) -> int:
    """The number of steps next: enough for the loop around them not to matter, few enough for a smooth schedule."""
    if meter.budget.seconds is None:
        return max(1, (meter.budget.evaluations or 0) // CHUNKS)
    longest = min(CHUNK_SECONDS, meter.budget.seconds / CHUNKS)
    return max(1, min(2 * steps, int(steps * longest / max(took, 1e-9))))


# --- the simple searches ------------------------------------------------------------------------


def random_placements(
    problem: Problem, meter: BudgetMeter, generator: np.random.Generator
) -> Iterator[Found]:
    """Random placements, one after the other."""
    while True:
        placement = problem.drawn(generator)
        yield Found(placement, problem.cost(placement))


def greedy(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """Fills stage after stage with the devices nearest to those already in it, each time from other first devices."""
    while True:
        # a random placement says what is allowed: the sizes of its groups are kept
        sizes = np.bincount(problem.drawn(generator), minlength=problem.stages)
        placement = near_neighbours(problem, sizes, generator)
        yield Found(placement, problem.cost(placement))


def near_neighbours(problem: Problem, sizes: Integers, generator: np.random.Generator) -> Integers:
    """The stage of each device [N], with `sizes` [S]; ties are broken at random."""
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
    """Yield what another search finds, and the same with its stages reordered where that matters."""
    for one in found:
        yield one
        if problem.order_matters:
            yield in_best_order(problem, one)


def in_best_order(problem: Problem, found: Found) -> Found:
    """The groups with the stages reordered, by single changes until none helps."""
    order, best, evaluations = list(range(problem.stages)), found, 0
    improved = True
    while improved:
        improved = False
        for trial in neighbours(order):
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


# --- DT-FM's genetic algorithm --------------------------------------------------------------------------
#
# arXiv 2206.01288, section 3.3, as its public solver has it. 100 random partitions. Again and again: two parents
# drawn at random, a child that takes the groups of five random devices from one and the rest from the other, sizes
# repaired, one pass of local search by chains, one evaluation; it replaces the worse parent if it is better. Matching
# and path are solved inside the evaluation.


def genetic(
    problem: Problem, meter: BudgetMeter, generator: np.random.Generator, wasted_links: bool = True
) -> Iterator[Found]:
    """The genetic search with DT-FM's local search, which moves fast links out of groups, or else with Kernighan
    and Lin's.
    """
    population: list[Found] = []
    for found in islice(random_placements(problem, meter, generator), POPULATION):
        population.append(found)
        yield found
    sizes = np.bincount(population[0].stage_of, minlength=problem.stages)
    while True:
        first, second = generator.choice(POPULATION, 2, replace=False)
        child = population[first].stage_of.copy()
        crossed = generator.choice(child.size, min(CROSSED, child.size), replace=False)
        child[crossed] = population[second].stage_of[crossed]
        repair(child, sizes, generator)
        improve(problem.weights, child, problem.stages, wasted_links)
        found = Found(child, problem.cost(child))
        worse = max(first, second, key=lambda parent: population[parent].cost)
        if found.cost < population[worse].cost:
            population[worse] = found
        yield found


def repair(stage_of: Integers, sizes: Integers, generator: np.random.Generator) -> None:
    """Moves random devices out of groups larger than `sizes` [S] into smaller ones, in place."""
    actual = np.bincount(stage_of, minlength=len(sizes))
    surplus = [
        generator.choice(np.flatnonzero(stage_of == stage), excess, replace=False)
        for stage, excess in enumerate(actual - sizes)
        if excess > 0
    ]
    if surplus:
        vacancies = np.repeat(np.arange(len(sizes)), np.maximum(sizes - actual, 0))
        stage_of[np.concatenate(surplus)] = generator.permutation(vacancies)


# what `noloco plan --method` takes
METHODS: dict[str, Method] = {
    "anneal": anneal,
    "genetic": genetic,
    "kernighan-lin": partial(genetic, wasted_links=False),
    "greedy": greedy,
    "random": random_placements,
}
