"""Thousands of devices in 16 regions, with lines of three speeds, and what would be planned for them by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bootstrap.lab.placement.kernels import Floats, Integers
from bootstrap.lab.placement.methods import METHODS
from bootstrap.lab.placement.noloco import Training, noloco_problem
from bootstrap.lab.placement.scenario import Scenario
from bootstrap.lab.placement.search import Budget, run_search

REGIONS = 16
LINES = (1.0, 2.0, 5.0)  # Gbit/s
VOLUMES = {"data_parallel_bytes": 650e6, "pipeline_bytes": 471e6}


def regional(count: int, seed: int) -> dict[str, object]:
    """A scenario's file for `count` devices, as equally spread over 16 regions as can be."""
    generator = np.random.default_rng(seed)
    place = generator.uniform(0, 1, (REGIONS, 2))
    away = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    latency = 1.0 + 120 * away  # ms one way
    bandwidth = 4 / (1 + 40 * away)  # Gbit/s
    names = [f"region-{number}" for number in range(REGIONS)]
    return {
        "name": f"{count} devices",
        "region_names": names,
        "region_latency_ms": latency.tolist(),
        "region_bandwidth_gbps": bandwidth.tolist(),
        "regions": [names[device * REGIONS // count] for device in range(count)],
        "line_gbps": generator.choice(LINES, count).tolist(),
        "volumes": VOLUMES,
    }


def uneven(scenario: Scenario, seed: int) -> Scenario:
    """Every link times a factor of its own from [0.8, 1.25]."""
    factors = np.random.default_rng(seed).uniform(0.8, 1.25, scenario.latency.shape)
    upper = np.triu(factors, 1)
    both = upper + upper.T + np.eye(scenario.devices)
    return replace(scenario, latency=scenario.latency * both, bandwidth=scenario.bandwidth / both)


def by_hand(scenario: Scenario, stages: int, training: Training, seconds: float, seed: int) -> Integers:
    """Each region planned by itself, for all stages, with its share of `seconds`: the stage of each device [N]."""
    stage_of = np.empty(scenario.devices, np.int64)
    regions = sorted(set(scenario.regions))
    for region in regions:
        own = np.flatnonzero(np.array(scenario.regions) == region)
        problem = noloco_problem(part(scenario, own), stages, training)
        budget = Budget(seconds=seconds / len(regions))
        stage_of[own] = run_search(problem, METHODS["anneal"], budget, seed).stage_of
    return stage_of


def part(scenario: Scenario, own: Integers) -> Scenario:
    """These devices alone."""

    def among(times: Floats) -> Floats:
        return np.ascontiguousarray(times[np.ix_(own, own)])

    return replace(
        scenario,
        latency=among(scenario.latency),
        bandwidth=among(scenario.bandwidth),
        regions=tuple(scenario.regions[device] for device in own),
        members=tuple(scenario.members[device] for device in own if scenario.members),
    )
