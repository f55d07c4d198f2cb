"""A machine or a container shuts down in the middle of training, and what is left of the node then."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon, wait_until

DOCKER_PATIENCE = 10.0  # seconds until `docker stop` kills


@pytest.fixture
def started() -> Iterator[list[Daemon]]:
    daemons: list[Daemon] = []
    yield daemons
    for daemon in daemons:
        daemon.kill()


def terminate(daemon: Daemon) -> tuple[int, float]:
    """The exit code after SIGTERM, and the seconds that it took."""
    daemon.signal(signal.SIGTERM)
    began = time.monotonic()
    return daemon.process.wait(60), time.monotonic() - began


def health(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.watch.health", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.timeout(240)
def test_a_node_saves_within_ten_seconds_and_comes_back_as_what_its_volume_holds(
    tmp_path: Path, started: list[Daemon]
) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny", "--address-file", str(tmp_path / "address"))
    started.append(seed)
    address = seed.join_address()
    assert address in (tmp_path / "address").read_text(encoding="utf-8").splitlines()

    def start(name: str, stage: int) -> NodeDaemon:
        started.append(NodeDaemon(tmp_path / name, "--join", address, "--stage", str(stage)))
        return started[-1]  # type: ignore[return-value]

    start("first", 0)
    node = start("node", 1)
    assert wait_until(lambda: [event for event in node.events("round") if event["round"] >= 2]), node.output
    well = health(node.state)
    assert well.returncode == 0, well.stderr
    assert json.loads(well.stdout)["peer"] in node.address
    assert json.loads(health(tmp_path / "run").stdout)["state"] == "seed"

    code, seconds = terminate(node)
    assert (code, seconds < DOCKER_PATIENCE) == (0, True), f"{seconds:.1f} s\n{node.output}"
    assert health(node.state).returncode == 1
    left, peer, lives = node.events("left")[-1], peer_of(node), len(node.events("serving"))

    again = start("node", 1)
    assert wait_until(lambda: len(again.events("serving")) > lives, while_true=again.still_running), (
        again.output
    )
    [restored] = again.events("restored")
    assert (restored["step"], restored["round"], peer_of(again)) == (left["step"], left["round"], peer)
    again.wait_for_step(restored["step"] + 5)

    start("other", 1).wait_for_event("downloaded")
    assert terminate(again)[0] == 0, again.output
    shutil.rmtree(again.state)
    newcomer = start("node", 1)
    assert newcomer.wait_for_event("downloaded")["round"] > 0
    assert not newcomer.events("restored")
    assert peer_of(newcomer) != peer

    code, seconds = terminate(seed)
    assert (code, seconds < DOCKER_PATIENCE) == (0, True), f"{seconds:.1f} s\n{seed.output}"


def peer_of(node: NodeDaemon) -> str:
    return node.address.rsplit("/", 1)[1]
