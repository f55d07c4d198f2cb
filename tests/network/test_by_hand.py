"""A run as people start it, in separate terminals, and everything that may die on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from daemons import Daemon, NodeDaemon, SeedDaemon, run_tool, wait_until


@pytest.fixture
def daemons() -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.kill()


@pytest.mark.timeout(420)
def test_a_run_survives_its_members_its_seed_peer_and_a_power_cut(
    tmp_path: Path, daemons: list[Daemon]
) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    daemons.append(seed)
    address = seed.join_address()
    nodes = [NodeDaemon(tmp_path / f"node{i}", "--join", address) for i in range(4)]
    daemons.extend(nodes)
    for node in nodes:
        node.wait_for_step(40)
    assert Counter(node.stage for node in nodes) == {0: 2, 1: 2}

    # kill -9 one node: the others go on and the loss keeps falling
    victim, other = [node for node in nodes if node.stage == 1]
    first_stage = [node for node in nodes if node.stage == 0]
    victim.kill()
    before = other.step
    losses_before = mean(other.losses()[-20:])
    other.wait_for_step(before + 150)
    assert mean(other.losses()[-20:]) < losses_before
    assert all(node.still_running() for node in [other, *first_stage])

    # kill -9 the seed peer: a newcomer joins through a plain volunteer
    seed.kill()
    newcomer = NodeDaemon(tmp_path / "newcomer", "--join", first_stage[0].address)
    daemons.append(newcomer)
    downloaded = newcomer.wait_for_event("downloaded")
    assert downloaded["step"] > before
    assert newcomer.stage == 1
    newcomer.wait_for_step(downloaded["step"] + 60)
    paired = wait_until(lambda: [r for r in newcomer.events("round") if r["partner"]])
    assert paired, "the newcomer never averaged with anybody"
    assert mean(newcomer.losses()[-20:]) < losses_before + 0.3

    # from outside: status, evaluation and export through any member
    status = run_tool("status", "--join", newcomer.address)
    assert status.returncode == 0, status.stderr
    assert status.stdout.count("serving") == 4, status.stdout
    evaluation = run_tool("eval", "--join", newcomer.address, "--sequences", "16")
    assert evaluation.returncode == 0, evaluation.stderr
    assert "nats per byte" in evaluation.stdout
    export = run_tool("export", "--join", newcomer.address, "--out", str(tmp_path / "model"))
    assert export.returncode == 0, export.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()

    # kill -9 everything; the state directories are enough to go on
    survivors = [other, newcomer, *first_stage]
    for node in survivors:
        node.wait_for_event("checkpoint")
    steps = {node.state: node.events("checkpoint")[-1]["step"] for node in survivors}
    peers = {node.state: node.address.rsplit("/", 1)[1] for node in survivors}
    for node in survivors:
        node.kill()
    again = [NodeDaemon(node.state) for node in survivors]
    daemons.extend(again)
    for node in again:
        node.wait_for_event("restored")
        assert node.events("restored")[-1]["step"] >= steps[node.state]
        node.wait_for_step(node.events("restored")[-1]["step"] + 30)
        assert node.address.rsplit("/", 1)[1] == peers[node.state]
    for node in again:
        assert node.leave() == 0, node.output
