"""Nodes with too little memory for the microbatch, as real processes: they start smaller, and do not die later."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, NodeDaemon, SeedDaemon, run_tool, wait_until

from protocol.manifest import preset_text

MIB = 2**20
# MiB that the limited node of each stage may take, most of it the program itself
FIRST, LAST = 780, 800
ROUNDS = 3


def manifest_with(folder: Path, **changes: object) -> Path:
    """The tiny preset with other numbers: name=value, wherever it stands."""
    text = preset_text("tiny")
    for name, value in changes.items():
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


class Watched:
    """A node, and the most memory that it was seen to hold, its p2pd included."""

    def __init__(self, node: NodeDaemon) -> None:
        self.node, self.most = node, 0

    def look(self) -> None:
        process = psutil.Process(self.node.process.pid)
        own = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+)", own)[1]) * 1024  # type: ignore[index]
        self.most = max(self.most, peak + sum(child.memory_info().rss for child in process.children()))


@pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit")
def test_limited_nodes_start_smaller_say_so_and_live(tmp_path: Path, processes: list[Daemon]) -> None:
    """One limited by --max-memory, one by ulimit alone, through rounds with a partner, checkpoints, evaluation."""
    manifest = manifest_with(tmp_path, sequence_tokens=512, sequences=16, inner_steps=2)
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest))
    processes.append(seed)
    common = ("--join", seed.join_address(), "--checkpoint-minutes", "0.05")
    first = NodeDaemon(tmp_path / "first", *common, "--stage", "0", "--max-memory", f"{FIRST}MiB")
    limit = ("prlimit", f"--data={LAST * MIB}")
    last = NodeDaemon(tmp_path / "last", *common, "--stage", "1", prefix=limit)
    partner = NodeDaemon(tmp_path / "partner", *common, "--stage", "1")
    nodes = [first, last, partner]
    processes.extend(nodes)
    watched = [Watched(first), Watched(last)]

    def lived() -> bool:
        for each in watched:
            each.look()
        rounds = [event for event in last.events("round") if event["partner"]]
        return len(rounds) >= ROUNDS and len(first.events("round")) >= ROUNDS

    last.wait_for_event("serving")
    first.wait_for_event("serving")
    assert wait_until(lived, while_true=lambda: all(node.still_running() for node in nodes)), last.output
    evaluated = run_tool("eval", "--join", seed.join_address(), "--sequences", "20")
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    lived()
    for node, each, most in ((first, watched[0], FIRST), (last, watched[1], LAST)):
        told = node.events("execution")[0]
        print(f"{each.most / MIB:.0f} of {most} MiB:", node.wait_for(r"Stage \d computes.*").group())
        assert told["recomputes"] or told["at_once"] or told["in_flight"] < 2, told
        assert node.events("checkpoint")
        assert each.most <= most * MIB, f"{each.most / MIB:.0f} MiB"
    assert not partner.events("execution")[0]["at_once"], "that one has all it needs"
    for node in (first, last):
        assert node.leave() == 0, node.output


@pytest.mark.parametrize("how", ["--max-memory", "prlimit"])
def test_a_limit_below_any_stage_is_refused_with_the_number(
    how: str, tmp_path: Path, processes: list[Daemon]
) -> None:
    manifest = manifest_with(tmp_path, sequence_tokens=512, sequences=16)
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest))
    processes.append(seed)
    arguments, prefix = ("--max-memory", "560MiB"), ()
    if how == "prlimit":
        arguments, prefix = (), ("prlimit", f"--data={560 * MIB}")
    node = NodeDaemon(tmp_path / "node", "--join", seed.join_address(), *arguments, prefix=prefix)
    processes.append(node)
    assert node.process.wait(60) == 2, node.output
    assert "Traceback" not in node.output
    assert re.search(
        r"Stage \d of run 'tiny' needs \d+\.\d MiB of memory, but .* free of the 560", node.output
    )
    assert re.search(r"A limit of \d+.\d MiB would do", node.output)
