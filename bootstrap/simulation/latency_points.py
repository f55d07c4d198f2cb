"""All-reduce against gossip for every number of replicas and variation of latencies that was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bootstrap.simulation.idle import Round, blocked
from bootstrap.simulation.latency import expected_sync, simulate_sync
from bootstrap.simulation.latency_report import Conditions, LatencyPoint


def simulated(
    sizes: Sequence[int], sigmas: Sequence[float], conditions: Conditions, seed: int
) -> list[LatencyPoint]:
    """Every σ for every number of replicas, each from random numbers of its own."""
    rounds = Round(conditions.inner_steps, conditions.step / conditions.latency, conditions.variation)
    expected = {sigma: expected_sync(list(sizes), sigma, conditions.transfer) for sigma in sigmas}
    points = []
    for n, sigma in itertools.product(sizes, sigmas):
        # by σ and N, so that a point is the same whatever else is asked for
        generator = np.random.default_rng([seed, n, round(sigma * 1e6)])
        sync = simulate_sync(n, sigma, conditions.samples, generator, conditions.transfer)
        standing = blocked(n, rounds, sync, sigma, conditions.transfer, generator)
        points.append(LatencyPoint(n, sigma, sync, expected[sigma][n], standing))
    return points
