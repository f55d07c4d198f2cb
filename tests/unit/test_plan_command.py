"""`noloco plan`: what a person and a program get, and one line for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bootstrap.tools_cli import app
from tests.placement_cases import SCENARIOS

WORLDWIDE = SCENARIOS / "case5_worldwide.json"


def run(*arguments: str, scenario: Path = WORLDWIDE) -> Result:
    return CliRunner().invoke(app, ["plan", "--scenario", str(scenario), "--evaluations", "300", *arguments])


def told(*arguments: str, scenario: Path = WORLDWIDE) -> dict[str, Any]:
    answer = run("--json", *arguments, scenario=scenario)
    assert answer.exit_code == 0, answer.output
    contents: dict[str, Any] = json.loads(answer.stdout)
    return contents


@pytest.mark.parametrize("objective", ["dtfm", "noloco"])
def test_json_has_the_plan_and_its_cost(objective: str) -> None:
    contents = told("--stages", "8", "--replicas", "8", "--objective", objective, "--method", "random")
    assert contents["method"] == "random"
    assert contents["objective"] == objective
    assert contents["seconds"] >= 0
    assert contents["cost"] > 0
    assert [len(stage) for stage in contents["stages"]] == [8] * 8
    assert sorted(device for stage in contents["stages"] for device in stage) == list(range(64))
    if objective == "dtfm":
        assert sum(contents["terms"].values()) == pytest.approx(contents["cost"])


def test_the_same_seed_gives_the_same_plan() -> None:
    first, again, other = (
        told("--objective", "dtfm", "--method", "random", "--seed", seed) for seed in ("4", "4", "5")
    )
    assert first["stages"] == again["stages"]
    assert first["stages"] != other["stages"]


def test_the_table_names_stages_places_and_cost() -> None:
    words = " ".join(run("--objective", "noloco").stdout.split())
    assert "world-wide" in words
    assert "Tokyo" in words
    assert "A step takes" in words
    assert "A random placement costs" in words
    assert "COMM" in run("--objective", "dtfm").stdout


@pytest.mark.long
def test_methods_are_compared_over_seeds() -> None:
    answer = run("--objective", "dtfm", "--compare", "--seeds", "2")
    assert answer.exit_code == 0, answer.output
    for method in ("anneal", "genetic", "kernighan-lin", "greedy", "random"):
        assert method in answer.stdout
    rows = told("--objective", "dtfm", "--compare", "--seeds", "2")["compared"]
    assert [row["median"] for row in rows] == sorted(row["median"] for row in rows)
    assert all(row["seeds"] == 2 for row in rows)


def test_pictures_of_matrix_and_map(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "plan.svg"
    assert run("--picture", str(file)).exit_code == 0
    assert "stage 7" in file.read_text(encoding="utf-8")
    contents = json.loads(WORLDWIDE.read_text())
    contents["coordinates"] = [[i // 8, i % 3] for i in range(64)]
    mapped = tmp_path / "mapped.json"
    mapped.write_text(json.dumps(contents))
    assert run("--picture", str(file), scenario=mapped).exit_code == 0
    assert "longitude" in file.read_text(encoding="utf-8")


@pytest.mark.long
def test_missing_links_are_estimated_and_told(tmp_path: Path) -> None:
    contents = json.loads(WORLDWIDE.read_text())
    contents["latency_ms"][3][9] = contents["latency_ms"][9][3] = None
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(contents))
    assert "1 links were not measured" in run(scenario=file).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--objective", "joy"), "--objective 'joy'"),
        (("--method", "magic"), "--method 'magic'"),
        (("--objective", "dtfm", "--replicas", "7"), "56 devices, but the scenario has 64"),
        (("--stages", "65"), "64 devices cannot fill 65"),
        (("--stages", "0"), "--stages"),
        (("--seconds", "inf"), "finite"),
        (("--uniform", "1.5"), "--uniform"),
        (("--picture", "plan.gif"), ".svg"),
        (("--picture", "/proc/nowhere/plan.svg"), "/proc/nowhere"),
        (("--scenario", "/nowhere.json"), "Cannot read /nowhere.json"),
        (("--join", "/ip4/127.0.0.1/tcp/1/p2p/x"), "either --scenario FILE or --join"),
        (("--publish", "noloco-run"), "--publish needs --join"),
        (("--hours", "25"), "--hours"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    answer = run(*arguments)
    assert answer.exit_code == 2
    lines = [line for line in answer.stderr.splitlines() if "rror:" in line]
    assert len(lines) == 1
    assert said in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.output
