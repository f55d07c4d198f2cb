"""A node with too little memory for a whole microbatch, as a real process: it starts smaller, and stays within it.

The limit is the volunteer's own, the kernel's for a control group, as of a container, and the shell's ulimit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.run.manifest import preset_text
from tests.real.daemons import PATIENCE, Daemon, NodeDaemon, SeedDaemon, run_tool, wait_until

MIB = 2**20
CHANGES = {
    "stages": 1,
    "sequence_tokens": 256,
    "sequences": 16,
    "microbatches": 1,
    "inner_steps": 1,
}
GROUPS = Path("/sys/fs/cgroup/memory")  # version 1, which lets root make one where a container's daemon would


def manifest_of_large_microbatches(folder: Path) -> Path:
    """The tiny preset in one stage, with microbatches that take ten times the memory of its weights."""
    text = preset_text("tiny")
    for name, value in CHANGES.items():
        text, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert found, name
    path = folder / "long.toml"
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Limited:
    """How a node is started under a limit: with options of its own, or by what comes before its command."""

    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


def by_option(limit: float) -> Limited:
    return Limited(options=("--max-memory", f"{limit}MiB"))


def by_ulimit(limit: float) -> Limited:
    return Limited(prefix=("bash", "-c", f'ulimit -d {int(limit * 1024)}; exec "$@"', "bash"))


def by_control_group(limit: float) -> Limited:
    """All that the node starts is in the group too; the kernel kills in it at the limit."""
    group = GROUPS / f"noloco-test-{os.getpid()}-{int(limit)}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(int(limit * MIB)))
    return Limited(prefix=("bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash"))


@dataclass(frozen=True)
class Kind:
    """A kind of limit, its name in messages, and a limit under which the program starts but no stage fits."""

    limited: Callable[[float], Limited]
    name: str
    too_little: int  # MiB
    counts_resident: bool = False  # the limit is on what the processes hold


def no_groups() -> bool:
    return not os.access(GROUPS / "memory.limit_in_bytes", os.W_OK)


@pytest.fixture
def processes() -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.kill()
    for group in GROUPS.glob(f"noloco-test-{os.getpid()}-*"):
        assert wait_until(partial(emptied, group), 10)
        group.rmdir()


def emptied(group: Path) -> bool:
    """What was killed has left it."""
    return not (group / "cgroup.procs").read_text()


def held_by(node: NodeDaemon) -> int:
    """Bytes, its p2pd included."""
    process = psutil.Process(node.process.pid)
    resident: int = process.memory_info().rss
    return resident + sum(child.memory_info().rss for child in process.children())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            Kind(by_option, "--max-memory", 300, counts_resident=True), id="option", marks=pytest.mark.long
        ),
        pytest.param(Kind(by_ulimit, "ulimit -d", 500), id="ulimit", marks=pytest.mark.long),
        pytest.param(
            Kind(by_control_group, "the container", 450),
            id="control-group",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(
                    no_groups(), reason=f"needs root and {GROUPS} (control groups, version 1)"
                ),
            ],
        ),
    ],
)
@pytest.mark.timeout(300)  # a third of it is enough on a quiet machine
def test_a_limit_is_refused_with_one_that_would_do_and_under_that_one_a_node_trains(
    tmp_path: Path, processes: list[Daemon], kind: Kind
) -> None:
    def started(name: str, how: Limited, *more: str) -> NodeDaemon:
        node = NodeDaemon(tmp_path / name, *join, *how.options, *more, prefix=how.prefix)
        processes.append(node)
        return node

    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest_of_large_microbatches(tmp_path)))
    processes.append(seed)
    join = ("--join", seed.join_address())

    refused = started("refused", kind.limited(kind.too_little))
    assert refused.process.wait(90) == 2, refused.output
    assert "Traceback" not in refused.output
    met = rf"Stage 0 of run 'tiny' needs .* of the {kind.too_little}\.0 MiB that {kind.name} allows"
    assert re.search(met, refused.output), refused.output
    told = re.search(r"A limit of (\d+\.\d) MiB would do", refused.output)
    assert told is not None, refused.output

    limit = float(told[1])
    node = started("node", kind.limited(limit), "--checkpoint-minutes", "0.05")
    node.wait_for_event("serving")
    partner = started("partner", Limited())
    partner.wait_for_event("serving")
    most = 0

    def meets(condition: Callable[[], Any]) -> bool:
        def look() -> Any:
            nonlocal most
            most = max(most, held_by(node))
            return condition()

        return bool(wait_until(look, PATIENCE, node.still_running))

    assert meets(lambda: [r for r in node.events("round") if r["partner"]]), node.output
    assert partner.leave() == 0, partner.output
    measured = run_tool("eval", *join)  # by the only node that is left
    assert measured.returncode == 0, f"{measured.stdout}{measured.stderr}"
    assert meets(lambda: node.events("checkpoint")), node.output
    step = node.step
    assert meets(lambda: node.step > step), node.output
    way = node.events("execution")[0]
    print(f"{most / MIB:.0f} of {limit:.0f} MiB:", node.wait_for(r"Stage \d computes.*").group())
    assert 0 < way["at_once"] < CHANGES["sequences"], way
    # ulimit counts what nothing was written to yet, a group not what others read first
    if kind.counts_resident:
        assert most <= limit * MIB
    assert node.leave() == 0, node.output
