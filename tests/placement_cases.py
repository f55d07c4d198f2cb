"""Scenarios that several tests of placement share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bootstrap.lab.placement.scenario import Scenario, read_scenario

SCENARIOS = Path(__file__).parent / "data" / "scenarios"
GIVEN = ("case3_multidc", "case4_regional", "case5_worldwide")


def given_scenario(name: str) -> Scenario:
    return read_scenario(SCENARIOS / f"{name}.json")


def random_scenario(count: int, seed: int) -> Scenario:
    """Every link is drawn by itself; with every third seed there are only two speeds."""
    generator = np.random.default_rng(seed)
    latency, bandwidth = (
        generator.uniform(0, 0.2, (count, count)),
        generator.uniform(1e8, 5e9, (count, count)),
    )
    latency, bandwidth = latency + latency.T, bandwidth + bandwidth.T
    if seed % 3 == 0:
        bandwidth = 1e9 * np.ceil(bandwidth / 4e9)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    return Scenario("random", latency, bandwidth, *generator.uniform(1e7, 1e9, 2))


def scattered(count: int, seed: int) -> Scenario:
    """Devices of a home network each, some in machines of four: fast links inside a machine, slow ones elsewhere."""
    generator = np.random.default_rng(seed)
    machine = np.where(np.arange(count) < count // 2, np.arange(count) // 4, 1000 + np.arange(count))
    together = machine[:, None] == machine[None, :]
    speed, place = generator.choice([1e8, 3e8, 1e9], count), generator.uniform(0, 0.1, (count, 2))
    speed[: count // 2] = np.repeat(speed[: count // 2 : 4], 4)
    place[: count // 2] = np.repeat(place[: count // 2 : 4], 4, axis=0)
    bandwidth = np.where(together, 50e9, np.minimum(speed[:, None], speed[None, :]))
    latency = np.where(together, 1e-5, 0.005 + np.linalg.norm(place[:, None] - place[None, :], axis=2))
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    return Scenario("scattered", latency, bandwidth, 100e6, 50e6)


def trap(order: np.ndarray | None = None) -> Scenario:
    """Eight machines of four on lines of 0.1 Gbit/s, 32 devices on lines of 0.3, and 72 ms between any two homes.

    By `order` [64] they are named. With each machine spread over four stages and the single devices in four stages
    of their own (`spread_out`), COMM is 31.63 s. Machines kept in one stage leave four hops on slow lines, not one.
    """
    device = np.arange(64) if order is None else order
    machine = np.where(device < 32, device // 4, device)
    together = machine[:, None] == machine[None, :]
    speed = np.where(device < 32, 1e8, 3e8)
    bandwidth = np.where(together, 50e9, np.minimum(speed[:, None], speed[None, :]))
    latency = np.where(together, 1e-5, 0.0719)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    return Scenario("trap", latency, bandwidth, 100e6, 50e6)


def spread_out(order: np.ndarray) -> np.ndarray:
    """The good plan of `trap`: the stage of each device [64]."""
    return np.where(order < 32, order % 4, order // 8)


def perturbed(scenario: Scenario, seed: int) -> Scenario:
    """Every link times a factor of its own from [0.8, 1.25], latency and bandwidth alike."""
    generator = np.random.default_rng(seed)
    latency, bandwidth = (_factors(scenario.devices, generator) for _ in range(2))
    return replace(scenario, latency=scenario.latency * latency, bandwidth=scenario.bandwidth * bandwidth)


def _factors(count: int, generator: np.random.Generator) -> np.ndarray:
    upper = np.triu(generator.uniform(0.8, 1.25, (count, count)), 1)
    return upper + upper.T + np.eye(count)
