"""Small things that people saw: who may read an export, which nodes a plan names, what a memory limit asks for."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from bootstrap.export.checkpoint import write_shards
from bootstrap.lab.placement.live_plan import Moves, moves_table
from bootstrap.lab.placement.noloco import Training
from bootstrap.lab.placement.plan import make_plan, problem_of
from bootstrap.lab.placement.plan_run import stage_table
from bootstrap.lab.placement.search import Budget
from node.machine.limits import Room
from node.membership.capacity import Peer
from node.model.resources import too_little
from node.model.stage import parameter_count
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from tests.placement_cases import given_scenario

TINY = load_preset("tiny")


def test_an_exported_model_can_be_read_by_whoever_can_read_the_rest(tmp_path: Path) -> None:
    stages = [np.zeros(parameter_count(TINY, stage), np.float32) for stage in range(TINY.stages)]
    before = os.umask(0o022)
    try:
        names = list(write_shards(TINY, stages, tmp_path, torch.float32, 2**30))
    finally:
        os.umask(before)
    assert names
    for name in names:
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("source", "advice"), [("--max-memory", "Raise that limit"), ("", "Close other programs")]
)
def test_a_limit_of_its_own_is_not_blamed_on_other_programs(source: str, advice: str) -> None:
    told = str(too_little(TINY, 0, 2**30, Room(2**20, 2**28, source)))
    assert advice in told
    assert ("Close other programs" in told) == (not source)


def shown(table: object) -> str:
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(table)
    return console.export_text()


def test_the_plan_of_a_swarm_names_its_nodes() -> None:
    scenario = given_scenario("case5_worldwide")
    problem = problem_of(scenario, "noloco", 8, None, Training(64, 16, 50, 1.0))
    plan = make_plan(problem, "random", Budget(evaluations=10), 0)
    peers = tuple(Peer(Identity.from_seed("plan", n).peer_id, n % 8) for n in range(scenario.devices))
    names = ["ann", *(f"…{peer.peer[-8:]}" for peer in peers[1:])]
    text = shown(stage_table(plan, scenario, 0.5, problem, names))
    assert all(name in text for name in names)
    goal = np.array([(n + 1) % 8 for n in range(scenario.devices)])
    moved = shown(moves_table(Moves(peers, goal, 1.0, 0.5, tuple(names))))
    assert names[0] in moved
    assert "device" not in moved
