"""`noloco node pause, resume, finish, status`: a volunteer steers a daemon that runs."""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path

import psutil
import pytest

from node.watch.health import SOCKET_FILE
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool
from tests.real.test_bandwidth import PRESET


def order(node: NodeDaemon, name: str) -> str:
    done = run_tool("node", name, "--state-dir", str(node.state))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_a_node_pauses_resumes_and_finishes_as_it_is_told(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    address = seed.join_address()
    nodes = [
        NodeDaemon(tmp_path / f"node-{number}", "--join", address, "--stage", str(min(number, 1)))
        for number in range(3)
    ]
    first, paused, other = nodes
    paused.wait_for_step(3)
    socket = Path((paused.state / SOCKET_FILE).read_text(encoding="utf-8"))
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600

    assert "Paused" in order(paused, "pause")
    seconds = paused.wait_for_event("paused")["time"] - paused.wait_for_event("pausing")["time"]
    print(f"paused after {seconds:.1f} s")
    assert "paused" in order(paused, "status")
    assert "you asked for it" in order(paused, "status")
    before = paused.step
    assert (paused.state / "checkpoint.safetensors").exists()
    first.wait_for_step(first.step + 5)  # the other replica takes its part
    assert paused.step == before
    assert not first.events("microbatches-dropped")

    assert "takes its stage up again" in order(paused, "resume")
    paused.wait_for_step(before + 3)
    assert len({event["addresses"][0] for event in paused.events("addresses")}) == 1  # the same peer
    assert re.search(r"serving, stage 1, step \d+, round \d+, [\d,]+ tokens", order(paused, "status"))
    assert "It leaves" in order(other, "finish")
    assert other.process.wait(60) == 0, other.output
    for node in (paused, first):
        assert node.leave() == 0, node.output


@pytest.mark.timeout(300)
def test_a_pause_gives_the_memory_of_a_large_stage_back(tmp_path: Path) -> None:
    """On a CPU, so that it is the process's. 33 million parameters: θ, φ, δ, gradients, two moments in float32."""
    manifest = tmp_path / "large.toml"
    text = PRESET.read_text(encoding="utf-8")
    for name, value in (("hidden_size", 1024), ("intermediate_size", 4096), ("heads", 8)):
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    text = text.replace('optimizer = "muon"', 'optimizer = "adamw"')  # Muon has one moment
    text = re.sub(r"^muon_learning_rate.*\n", "", text, flags=re.MULTILINE)
    manifest.write_text(text, encoding="utf-8")
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest))
    node = NodeDaemon(tmp_path / "node", "--join", seed.join_address(), "--stage", "1")
    parameters = int(node.wait_for(r"\(([\d,]+) parameters\)").group(1).replace(",", ""))
    process = psutil.Process(node.process.pid)
    before = process.memory_info().rss
    began = time.monotonic()
    order(node, "pause")
    seconds, after = time.monotonic() - began, process.memory_info().rss
    print(f"{parameters:,} parameters: {before >> 20} MiB, paused {after >> 20} MiB after {seconds:.1f} s")
    assert (
        before - after > 0.8 * 6 * 4 * parameters
    )  # when the command has returned; how soon is told, not asserted
    order(node, "resume")
    node.wait_for(r"Continuing from the checkpoint")
    assert node.leave() == 0, node.output


def test_without_a_node_it_says_so(tmp_path: Path) -> None:
    done = run_tool("node", "pause", "--state-dir", str(tmp_path))
    assert done.returncode != 0
    assert "--state-dir" in done.stderr
    assert "Traceback" not in done.stderr
