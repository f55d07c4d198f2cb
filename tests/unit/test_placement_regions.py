"""Scenarios of thousands of devices: links between regions, clusters of devices that are alike, and their plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placements.regions import by_hand, regional, uneven
from typer.testing import CliRunner

from bootstrap.lab.placement import region_file
from bootstrap.lab.placement.dtfm import dtfm_problem
from bootstrap.lab.placement.methods import anneal
from bootstrap.lab.placement.noloco import Training, noloco_problem
from bootstrap.lab.placement.plan import problem_of
from bootstrap.lab.placement.scenario import scenario_from
from bootstrap.lab.placement.search import Budget, run_search
from bootstrap.tools_cli import app
from protocol.errors import ScenarioError

THREE = {
    "name": "three",
    "region_names": ["a", "b", "c"],
    "region_latency_ms": [[1, 10, 20], [12, 2, 30], [20, 30, 3]],
    "region_bandwidth_gbps": [[10, 1, 0.5], [1, 8, 0.4], [0.5, 0.4, 6]],
    "regions": ["a", "c", "b", "a"],
    "line_gbps": [5, 1, 0.7, 20],
    "volumes": {"data_parallel_bytes": 1e8, "pipeline_bytes": 1e8},
}


# --- the file -----------------------------------------------------------------------------------


def test_links_between_regions_are_those_between_their_devices() -> None:
    scenario = scenario_from(THREE)
    assert scenario.devices == 4
    assert scenario.members == ()
    assert scenario.regions == ("a", "c", "b", "a")
    assert scenario.latency[0].tolist() == pytest.approx([0, 0.020, 0.011, 0.001])
    assert scenario.bandwidth[0, 1:].tolist() == pytest.approx([0.5e9, 0.7e9, 5e9])
    assert np.array_equal(scenario.bandwidth, scenario.bandwidth.T)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"region_names": []}, "region_names is not a list"),
        ({"regions": ["a", "d"]}, r"regions\[1\] is 'd'"),
        ({"regions": ["a"]}, "regions is not a list"),
        ({"region_latency_ms": [[1]]}, "region_latency_ms is not a list of 3 rows"),
        ({"region_latency_ms": [[1, 2], [1, 2, 3], [1, 2, 3]]}, r"region_latency_ms\[0\] is not a list of 3"),
        ({"region_latency_ms": [[1, 2, None], [1, 2, 3], [1, 2, 3]]}, r"region_latency_ms\[0\]\[2\]"),
        ({"region_bandwidth_gbps": [[1, 2, 0]] * 3}, "region_bandwidth_gbps has a zero"),
        ({"line_gbps": [1, 2, 3]}, "line_gbps is not a list of 4"),
        ({"line_gbps": [1, 2, 3, 0]}, "line_gbps has a zero"),
        ({"throughput": [1, 2, 3, "x"]}, r"throughput\[3\]"),
        ({"volumes": None}, "volumes"),
    ],
)
def test_what_is_wrong_with_it_is_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        scenario_from({**THREE, **wrong})


# --- clusters -----------------------------------------------------------------------------------


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Few devices already count as thousands."""

    def set_them() -> None:
        monkeypatch.setattr(region_file, "MAX_DEVICES", 100)
        monkeypatch.setattr(region_file, "CLUSTERS", 80)

    return set_them


def test_clusters_are_of_one_region_and_cost_what_their_devices_do(fewer: Callable[[], None]) -> None:
    contents = regional(480, 1) | {"throughput": [1.5] * 480, "memory_bytes": [*range(1, 481)]}
    single = scenario_from(contents)
    fewer()
    clusters = scenario_from(contents)
    assert 64 <= clusters.devices <= 96
    assert sorted(device for own in clusters.members for device in own) == list(range(480))
    for number, own in enumerate(clusters.members):
        assert {single.regions[device] for device in own} == {clusters.regions[number]}
    assert clusters.memory is not None
    assert clusters.throughput is not None
    assert clusters.memory.tolist() == [min(own) + 1 for own in clusters.members]
    assert clusters.throughput.sum() == pytest.approx(720)
    few, many = (noloco_problem(scenario, 8, Training()) for scenario in (clusters, single))
    for seed in range(5):
        placement = few.drawn(np.random.default_rng(seed))
        stage_of = np.empty(480, np.int64)
        for number, own in enumerate(clusters.members):
            stage_of[list(own)] = placement[number]
        assert few.cost(placement) == pytest.approx(many.cost(stage_of), rel=0.05)


def test_dtfm_and_lists_of_stages_are_for_single_devices(fewer: Callable[[], None]) -> None:
    fewer()
    with pytest.raises(ScenarioError, match="use --objective noloco"):
        dtfm_problem(scenario_from(regional(480, 1)), 8, 60)
    with pytest.raises(ScenarioError, match="may_serve"):
        scenario_from(regional(480, 1) | {"may_serve": [[0]] * 480})


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_plan_of_several_hundred_is_better_than_regions_planned_by_themselves() -> None:
    scenario = uneven(scenario_from(regional(320, 2)), 2)
    problem = noloco_problem(scenario, 8, Training())
    planned = run_search(problem, anneal, Budget(evaluations=4000), 0)
    assert problem.cost(planned.stage_of) == pytest.approx(planned.cost)
    assert planned.evaluations == 4000
    hand = by_hand(scenario, 8, Training(), seconds=1.6, seed=0)
    assert planned.cost < 0.8 * problem.cost(hand)


def test_a_coarse_problem_costs_what_its_devices_do() -> None:
    problem = problem_of(scenario_from(regional(320, 3)), "noloco", 8, None, Training())
    made = problem.coarse(np.random.default_rng(0))
    assert made is not None
    coarse, members = made
    stage_of = np.empty(320, np.int64)
    placement = coarse.drawn(np.random.default_rng(1))
    stage_of[members] = placement[:, None]
    assert coarse.cost(placement) == pytest.approx(problem.cost(stage_of), rel=0.03)


def test_the_command_plans_two_thousand(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps(regional(2000, 0)))
    arguments = ["plan", "--scenario", str(file), "--stages", "8", "--evaluations", "500"]
    contents = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert sorted(device for stage in contents["stages"] for device in stage) == list(range(2000))
    words = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert "2,000 devices in 8 stages" in words
    assert "clusters of near devices" in words
