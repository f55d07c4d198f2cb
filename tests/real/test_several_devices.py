"""One command for several devices, with real nodes: two on the processor, one for each stage."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.errors import INTERRUPTED
from tests.real.daemons import PATIENCE, Daemon, NodeDaemon, SeedDaemon, run_tool, wait_until


@pytest.fixture
def both(tmp_path: Path) -> Iterator[NodeDaemon]:
    """The command, when both of its nodes train."""
    started: list[Daemon] = []
    try:
        seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
        started.append(seed)
        address = seed.join_address("/ip4/127.0.0.1/")
        command = NodeDaemon(
            tmp_path / "nodes", "--join", address, "--device", "cpu,cpu", "--trace", str(tmp_path / "t.json")
        )
        started.append(command)
        steps = [command.state / f"device-{index}" / "events.jsonl" for index in range(2)]
        assert wait_until(
            lambda: all(path.exists() and '"event": "step"' in path.read_text() for path in steps),
            while_true=command.still_running,
        ), command.output
        yield command
    finally:
        for daemon in started:
            daemon.kill()


def test_one_of_them_can_be_paused_and_limits_are_shared(both: NodeDaemon) -> None:
    def ordered(*arguments: str, of: str = "") -> str:
        done = run_tool("node", *arguments, "--state-dir", str(both.state / of))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ordered("pause", of="device-1").count("Paused") == 1
    first, second = (line for line in ordered("status").splitlines() if line.startswith("Node"))
    assert ": serving" in first
    assert ": paused" in second
    assert "takes its stage up again" in ordered("resume", of="device-1")
    assert ordered("limits", "--max-upload", "20Mbit", "--gpu-percent", "90").count("10Mbit") == 2
    own = ordered("limits", "--max-upload", "5Mbit", of="device-0")
    assert "max-upload      5Mbit" in own
    assert "start this device's node by itself" in own
    shown = ordered("limits")
    assert [shown.count(limit) for limit in (" 5Mbit", " 10Mbit", " 90 ")] == [1, 1, 2]
    assert ordered("pause", "--device", "cpu").count("Paused") == 2
    assert both.leave() == 0


def test_one_ctrl_c_lets_both_nodes_leave(both: NodeDaemon) -> None:
    assert both.leave() == 0
    for index in range(2):
        assert '"event": "left"' in (both.state / f"device-{index}" / "events.jsonl").read_text()
        assert (both.state.parent / f"t-{index}.json").read_text().endswith("]\n")


def test_a_second_ctrl_c_leaves_no_process_behind(both: NodeDaemon) -> None:
    nodes = psutil.Process(both.process.pid).children()
    assert len(nodes) == 2
    for node in nodes:
        node.send_signal(signal.SIGSTOP)  # they will not leave by themselves
    both.signal(signal.SIGINT)
    time.sleep(1.0)  # or the two signals are one
    both.signal(signal.SIGINT)
    assert both.process.wait(PATIENCE) == INTERRUPTED
    assert wait_until(lambda: not any(node.is_running() for node in nodes))
