"""A scenario's devices as a swarm: its links and its devices' speeds are what training feels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from placements.trial import Trial, link_between, tokens_per_second

from bootstrap.lab.placement.scenario import Scenario, scenario_from

TRIAL = Trial(microbatches=4, warm_up_steps=1, steps=2)
STAGE_OF = [0, 0, 1, 1]


def scenario(latency_ms: float, gbps: float, **more: Any) -> Scenario:
    volumes = {"data_parallel_bytes": 1e6, "pipeline_bytes": 1e6}
    links = {
        "latency_ms": np.full((4, 4), latency_ms).tolist(),
        "bandwidth_gbps": np.full((4, 4), gbps).tolist(),
    }
    return scenario_from({"name": "four", "volumes": volumes, **links, **more})


def test_a_microbatch_takes_as_long_as_the_scenarios() -> None:
    """8.4 MB over 1 Gbit/s take 67 ms, and so does what the small model sends over the scaled link."""
    link = link_between(scenario(50, 1), 0, 2, scale=0.001)
    assert link.latency == pytest.approx(0.05)
    assert TRIAL.microbatch_bytes * 0.001 / link.bandwidth == pytest.approx(0.0671, rel=1e-3)
    assert link_between(scenario(50, 1), None, 2, 1.0).latency == 0


@pytest.mark.long
def test_the_same_placement_gives_the_same_speed_and_better_links_more() -> None:
    near = tokens_per_second(scenario(5, 10), STAGE_OF, TRIAL)
    assert tokens_per_second(scenario(5, 10), STAGE_OF, TRIAL) == near
    assert tokens_per_second(scenario(300, 10), STAGE_OF, TRIAL) < 0.7 * near
    assert tokens_per_second(scenario(5, 0.2), STAGE_OF, TRIAL) < 0.7 * near


@pytest.mark.long
def test_a_faster_device_trains_more() -> None:
    trial = replace(TRIAL, steps=6)
    slow = tokens_per_second(scenario(1, 100), STAGE_OF, trial)
    fast = tokens_per_second(scenario(1, 100, throughput=[3, 3, 3, 3]), STAGE_OF, trial)
    assert fast > 2 * slow
