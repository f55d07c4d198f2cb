"""Reading scenarios: what stands in the file is what is planned for, and what is wrong is told with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lab.placement.region_file import MAX_DEVICES
from bootstrap.lab.placement.scenario import read_scenario, scenario_from
from protocol.errors import ScenarioError
from tests.placement_cases import GIVEN, SCENARIOS


def contents(count: int = 4, **changes: Any) -> dict[str, Any]:
    """A scenario's file: 10 ms and 2 Gbit/s between any two."""
    square = [[0 if i == j else 1 for j in range(count)] for i in range(count)]
    made: dict[str, Any] = {
        "name": "small",
        "devices": count,
        "volumes": {"data_parallel_bytes": 1e6, "pipeline_bytes": 2e6},
        "latency_ms": [[10 * value for value in row] for row in square],
        "bandwidth_gbps": [[2 * value for value in row] for row in square],
    }
    return made | changes


def with_entry(matrix: str, row: int, column: int, value: Any) -> dict[str, Any]:
    made = contents()
    made[matrix][row][column] = value
    return made


@pytest.mark.parametrize("name", GIVEN)
def test_the_given_scenarios_are_read_in_seconds_and_bits(name: str) -> None:
    file = SCENARIOS / f"{name}.json"
    given, read = json.loads(file.read_text()), read_scenario(file)
    assert read.devices == 64
    assert read.latency[1, 40] == pytest.approx(
        (given["latency_ms"][1][40] + given["latency_ms"][40][1]) / 2000
    )
    assert read.bandwidth[1, 40] == pytest.approx(
        (given["bandwidth_gbps"][1][40] + given["bandwidth_gbps"][40][1]) * 5e8
    )
    assert read.data_parallel_bytes == 650e6
    assert read.estimated == 0


def test_a_transfer_is_latency_and_bytes() -> None:
    times = scenario_from(contents()).transfer(1e9)
    assert times[0, 1] == pytest.approx(0.010 + 8e9 / 2e9)
    assert times[0, 0] == 0


def test_both_directions_are_averaged_and_one_is_enough() -> None:
    made = with_entry("latency_ms", 0, 1, 30)
    assert scenario_from(made).latency[1, 0] == pytest.approx(0.020)
    made["latency_ms"][1][0] = None
    assert scenario_from(made).latency[1, 0] == pytest.approx(0.030)


def test_what_is_on_the_diagonal_does_not_matter() -> None:
    for value in (None, 7):
        made = with_entry("bandwidth_gbps", 2, 2, value)
        made["latency_ms"][2][2] = value
        assert scenario_from(made).transfer(1e9)[2, 2] == 0


def test_links_that_were_not_measured_are_estimated_and_counted() -> None:
    made = contents(6)
    for matrix in ("latency_ms", "bandwidth_gbps"):
        made[matrix][0][1] = made[matrix][1][0] = None
    read = scenario_from(made)
    assert read.estimated == 1
    assert read.latency[0, 1] == pytest.approx(0.010, rel=0.2)
    assert read.bandwidth[0, 1] == pytest.approx(2e9, rel=0.2)


def test_facts_of_the_devices_are_read() -> None:
    read = scenario_from(
        contents(
            regions=["a", "a", "b", "b"],
            coordinates=[[0, 0], [0, 1], [50, -100], [50, 100]],
            throughput=[1, 2, 3, 4.5],
            memory_bytes=[8e9, 8e9, 16e9, 16e9],
            stage_memory_bytes=6e9,
            site_uplink_gbps={"b": 1},
        )
    )
    assert read.regions == ("a", "a", "b", "b")
    assert read.throughput is not None
    assert read.throughput[3] == 4.5
    assert read.site is not None
    assert read.site.tolist() == [-1, -1, 0, 0]
    assert read.stage_memory == (6e9,)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (with_entry("bandwidth_gbps", 3, 1, -1), "bandwidth_gbps[3][1] is negative"),
        (with_entry("latency_ms", 3, 1, -0.5), "latency_ms[3][1] is negative"),
        (with_entry("latency_ms", 0, 2, float("nan")), "latency_ms[0][2] is nan"),
        (with_entry("bandwidth_gbps", 0, 2, float("inf")), "bandwidth_gbps[0][2] is inf"),
        (with_entry("bandwidth_gbps", 0, 2, 10**400), "bandwidth_gbps[0][2] is 1000"),
        (with_entry("bandwidth_gbps", 1, 2, 0), "bandwidth_gbps[1][2] is zero"),
        (with_entry("bandwidth_gbps", 1, 2, "fast"), "bandwidth_gbps[1][2] is 'fast'"),
        (with_entry("bandwidth_gbps", 1, 2, True), "bandwidth_gbps[1][2] is True"),
        (with_entry("bandwidth_gbps", 1, 2, {}), "bandwidth_gbps[1][2] is {}"),
        (contents(latency_ms=[[0, 1], [1, 0]]), "latency_ms has 2 rows, bandwidth_gbps 4"),
        (contents(latency_ms=[[0, 1, 2], [1, 0]]), "latency_ms[0] has 3 entries"),
        (contents(latency_ms=[1, 2, 3, 4]), "latency_ms[0] is not a list"),
        (contents(latency_ms=[]), "latency_ms is missing"),
        (contents(latency_ms=[[0]] * (MAX_DEVICES + 1)), f"at most {MAX_DEVICES}"),
        (contents(latency_ms=[[0]], bandwidth_gbps=[[0]]), "two devices"),
        (contents(devices=5), "devices is 5, but latency_ms has 4"),
        (contents(volumes=None), "volumes is missing"),
        (contents(volumes={"data_parallel_bytes": 1}), "volumes.pipeline_bytes is missing"),
        (contents(regions=["a"]), "regions is not a list of 4"),
        (contents(coordinates=[[0, 0]]), "coordinates is not a list of 4"),
        (contents(coordinates=[[0, 0], [0], [0, 0], [0, 0]]), "coordinates[1] is not a list of 2"),
        (contents(throughput=[1, 1, 0, 1]), "throughput[2] is zero"),
        (contents(memory_bytes=[1, 1, -1, 1]), "memory_bytes[2] is negative"),
        (contents(site_uplink_gbps={"mars": 1}), "'mars', which is not among regions"),
        (
            contents(bandwidth_gbps=[[0, 1, None, None], [1, 0, None, None], [None, None, 0, 1], [None, None, 1, 0]]),
            "No chain of measured links leads from device 0 to device 2",
        ),
        ([], "JSON object"),
        ("text", "JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(made: Any, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario_from(made)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda file: None, "Cannot read"),
        (lambda file: file.mkdir(), "Cannot read"),
        (lambda file: file.write_text("{"), "is not JSON"),
        (lambda file: file.write_text("[" * 100_000), "is not JSON"),
        (lambda file: file.write_text('{"devices": ' + "9" * 5000 + "}"), "is not JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "is not a text file"),
        (lambda file: file.write_bytes(b" " * (64 * 2**20 + 1)), "larger than 64 MiB"),
    ],
)
def test_files_that_are_no_scenario(tmp_path: Path, written: Callable[[Path], Any], said: str) -> None:
    file = tmp_path / "scenario.json"
    written(file)
    with pytest.raises(ScenarioError, match=said):
        read_scenario(file)
