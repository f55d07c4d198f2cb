"""A node with too little memory for a whole microbatch, as a real process: it starts smaller, and stays within it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, NodeDaemon, SeedDaemon, wait_until

from protocol.manifest import preset_text

MIB = 2**20
TOO_LITTLE = 300  # MiB: less than the program itself
CHANGES = {
    "stages": 1,
    "sequence_tokens": 256,
    "sequences": 16,
    "microbatches": 1,
    "inner_steps": 1,
}


def manifest_of_large_microbatches(folder: Path) -> Path:
    """The tiny preset in one stage, with microbatches that take ten times the memory of its weights."""
    text = preset_text("tiny")
    for name, value in CHANGES.items():
        text, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert found, name
    path = folder / "long.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def processes() -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.kill()


def held_by(node: NodeDaemon) -> int:
    """Bytes, its p2pd included."""
    process = psutil.Process(node.process.pid)
    resident: int = process.memory_info().rss
    return resident + sum(child.memory_info().rss for child in process.children())


@pytest.mark.timeout(300)  # a quarter of it is enough on a quiet machine
def test_a_limit_is_refused_with_one_that_would_do_and_under_that_one_a_node_trains(
    tmp_path: Path, processes: list[Daemon]
) -> None:
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest_of_large_microbatches(tmp_path)))
    processes.append(seed)
    join = ("--join", seed.join_address())

    refused = NodeDaemon(tmp_path / "refused", *join, "--max-memory", f"{TOO_LITTLE}MiB")
    processes.append(refused)
    assert refused.process.wait(90) == 2, refused.output
    assert "Traceback" not in refused.output
    assert re.search(
        r"Stage 0 of run 'tiny' needs \d+\.\d MiB of memory, but .* free of the 300", refused.output
    )
    told = re.search(r"A limit of (\d+\.\d) MiB would do", refused.output)
    assert told is not None, refused.output

    limit = float(told[1])
    node = NodeDaemon(
        tmp_path / "node", *join, "--max-memory", f"{told[1]}MiB", "--checkpoint-minutes", "0.05"
    )
    processes.append(node)
    most = 0

    def has_trained() -> bool:
        nonlocal most
        most = max(most, held_by(node))
        return bool(node.events("round")) and bool(node.events("checkpoint"))

    node.wait_for_event("serving")
    assert wait_until(has_trained, while_true=node.still_running), node.output
    way = node.events("execution")[0]
    print(f"{most / MIB:.0f} of {limit:.0f} MiB:", node.wait_for(r"Stage \d computes.*").group())
    assert 0 < way["at_once"] < CHANGES["sequences"], way
    assert most <= limit * MIB
    assert node.leave() == 0, node.output
