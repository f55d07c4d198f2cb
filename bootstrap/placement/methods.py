"""The searches by name."""

from __future__ import annotations

from bootstrap.placement.anneal import anneal
from bootstrap.placement.constructive import greedy, random_placements
from bootstrap.placement.genetic import genetic, kernighan_lin
from bootstrap.placement.search import Method

METHODS: dict[str, Method] = {
    "anneal": anneal,
    "genetic": genetic,
    "kernighan-lin": kernighan_lin,
    "greedy": greedy,
    "random": random_placements,
}
