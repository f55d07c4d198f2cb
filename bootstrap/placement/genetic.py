"""DT-FM's hybrid genetic algorithm: arXiv 2206.01288, section 3.3, as its public solver has it.

100 random partitions. Again and again: two parents drawn at random, a child that takes the groups of five random
devices from one and the rest from the other, sizes repaired, one pass of local search by chains, one evaluation;
it replaces the worse parent if it is better. Matching and path are solved inside the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bootstrap.placement.chains import Integers, improve
from bootstrap.placement.search import BudgetMeter, Found, Problem

POPULATION = 100
CROSSED = 5  # devices whose groups come from the other parent


def genetic(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """With DT-FM's local search, which moves fast links out of groups."""
    return _evolve(problem, generator, wasted_links=True)


def kernighan_lin(problem: Problem, meter: BudgetMeter, generator: np.random.Generator) -> Iterator[Found]:
    """The same frame with Kernighan and Lin's gain, which keeps fast links inside groups."""
    return _evolve(problem, generator, wasted_links=False)


def _evolve(problem: Problem, generator: np.random.Generator, wasted_links: bool) -> Iterator[Found]:
    population: list[Found] = []
    for _ in range(POPULATION):
        placement = problem.drawn(generator)
        population.append(Found(placement, problem.cost(placement)))
        yield population[-1]
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
