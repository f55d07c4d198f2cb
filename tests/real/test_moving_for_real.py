"""All replicas of a stage but one die by kill -9; a real node moves there, gets the state, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon, run_tool, wait_until

MANIFEST = """
name = "moving"
stages = 2

[model]
vocab_size = 256
hidden_size = 32
layers = 2
heads = 2
intermediate_size = 1024

[data]
source = "python-stdlib"
sequence_tokens = 32

[inner]
learning_rate = 2e-3
min_learning_rate = 2e-4
warmup_steps = 4
total_steps = 1_000_000
microbatches = 2
sequences = 1

[outer]
alpha = 0.5
beta = 0.7
gamma = 0.7
inner_steps = 25

[limits]
record_lifetime = 10.0
"""
REPLICAS = 3
TO_SERVE, TO_MOVE = 120.0, 180.0  # seconds at most, on a machine that may have other things to do


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeDaemon]]:
    """Six, of two stages; whichever of them took which."""
    started: list[Daemon] = []
    try:
        (tmp_path / "moving.toml").write_text(MANIFEST, encoding="utf-8")
        seed = SeedDaemon(tmp_path / "run", "--manifest", str(tmp_path / "moving.toml"))
        started.append(seed)
        address = seed.join_address()
        members = [NodeDaemon(tmp_path / f"node{n}", "--join", address) for n in range(2 * REPLICAS)]
        started += members
        for node in members:
            node.wait_for_event("serving", TO_SERVE)
        yield members
    finally:
        for daemon in started:
            daemon.kill()


@pytest.mark.timeout(900)
def test_a_real_node_moves_to_the_stage_that_lost_most_of_its_replicas(nodes: list[NodeDaemon]) -> None:
    stages = [[node for node in nodes if node.stage == stage] for stage in range(2)]
    # by their number: on a busy machine they are not always three and three
    last, first = sorted(stages, key=len)
    source, target = first[0].stage, last[0].stage
    assert len(last) >= 2
    for node in nodes:
        node.wait_for_step(5, TO_SERVE)
    left = last.pop()
    for victim in last:
        victim.kill()
    wait_until(lambda: any(node.events("moved") for node in first), TO_MOVE)
    movers = [node for node in first if node.events("moved")]
    assert len(movers) == 1, "\n".join(node.output[-2000:] for node in first)
    [mover] = movers
    [moved] = mover.events("moved")
    assert (moved["source"], moved["target"]) == (source, target)
    assert mover.events("downloaded")[-1]["step"] > 0, "the state was not handed over"
    for node in [left, *first]:
        node.wait_for_step(node.step + 50)
    look_and_publish(left.address, left.state.parent / "run", 1 + len(first))
    for node in [left, *first]:
        node.wait_for_event("plan")
    assert all(node.leave() == 0 for node in [left, *first])


def look_and_publish(address: str, directory: Path, nodes: int) -> None:
    """`noloco plan --join`, by the run's owner. It may take until the nodes have measured enough links."""
    plan = ("plan", "--join", address, "--evaluations", "500", "--json", "--publish", str(directory))
    answer = wait_until(lambda: (done := run_tool(*plan)).returncode == 0 and done, TO_MOVE)
    assert answer, run_tool(*plan).stderr
    contents = json.loads(answer.stdout)
    assert len(contents["peers"]) == nodes
    assert len(contents["moves"]) == sum(
        planned != now for planned, now in zip(contents["stage_of"], contents["stages_now"], strict=True)
    )
