"""`--gpu-percent 50`, from the start or while it runs: a node that has work all the time computes for half of it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool
from tests.real.test_bandwidth import PRESET

SECONDS = 20.0


def busy(node: NodeDaemon) -> float:
    """The share of the time in which it computed, over so long."""
    node.wait_for_step(node.step + 20, patience=200)
    time.sleep(SECONDS)
    steps = node.events("step")
    last = steps[-1]
    first = next(step for step in steps if step["time"] >= last["time"] - SECONDS)
    return float((last["computed"] - first["computed"]) / (last["time"] - first["time"]))


@pytest.mark.timeout(400)
def test_half_of_the_time_is_half_of_the_time(tmp_path: Path) -> None:
    manifest = tmp_path / "alone.toml"
    text = re.sub(r"^stages = 2$", "stages = 1", PRESET.read_text(encoding="utf-8"), flags=re.MULTILINE)
    manifest.write_text(text, encoding="utf-8")
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest))
    address = seed.join_address()
    node = NodeDaemon(tmp_path / "node", "--join", address)
    shares = [busy(node)]
    for limit in ("50", "none"):
        done = run_tool("node", "limits", "--state-dir", str(node.state), "--gpu-percent", limit)
        assert done.returncode == 0, done.stderr
        shares.append(busy(node))
    assert node.leave() == 0, node.output
    node = NodeDaemon(tmp_path / "node", "--join", address, "--gpu-percent", "50")
    shares.append(busy(node))
    assert node.leave() == 0, node.output
    print(f"busy {shares[0]:.1%} without a limit, {shares[1]:.1%} with 50 % set while it ran,")
    print(f"{shares[2]:.1%} once it was lifted, {shares[3]:.1%} with 50 % from the start on")
    assert shares[0] > 0.7
    assert shares[2] > 0.7
    for limited in (shares[1], shares[3]):
        assert 0.45 <= limited <= 0.55
