"""Commands as the pages show them, word for word, do what they are for: those that the table in tests/data names."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import patience
from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon
from tests.shown_commands import ROOT, commands_of, to_run

LONGEST = 400.0  # seconds: noloco plan searches for twenty, and a busy machine is five times as slow


def typed(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The command in a shell of the directory, with our programs on its path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NOLOCO_")}
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=directory,
        env={**kept, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(LONGEST),
    )


class Terminal(Daemon):
    """A shell of the directory in which one command goes on, with our programs on its path."""

    def __init__(self, command: str, directory: Path, name: str) -> None:
        settings = "export NOLOCO_PORT=0 NOLOCO_HOST=127.0.0.1 NOLOCO_DEVICE=cpu NOLOCO_THREADS=1"
        programs, place = shlex.quote(str(Path(sys.executable).parent)), shlex.quote(str(directory))
        path = f"export PATH={programs}:$PATH PYTHONPATH={shlex.quote(str(ROOT))}"
        line = f"cd {place}; {settings}; {path}; exec {command}"
        super().__init__(["bash", "-c", line], directory / f"{name}.log")

    def press_ctrl_c(self) -> None:
        """Leave with one Ctrl-C: the last node of a stage waits for a second one on a terminal alone."""
        assert self.leave(patience(60)) == 0, self.output


def assert_all_do(commands: list[tuple[str, str]], directory: Path, address: str = "") -> None:
    wrong = []
    for command, prints in commands:
        began = time.monotonic()
        done = typed(command.replace("ADDRESS", address), directory)
        print(f"{time.monotonic() - began:4.0f} s  {command}")
        said = done.stdout + done.stderr
        # a model of few steps may write white space alone
        if done.returncode or not done.stdout or prints not in said or "Traceback" in said:
            wrong.append(f"{command}: exit code {done.returncode}, not {prints!r} in:\n{said}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.timeout(patience(1500))
def test_commands_that_need_no_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "data" / "scenarios" / "case5_worldwide.json", tmp_path / "links.json")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    assert_all_do(to_run("alone"), tmp_path)


@pytest.mark.timeout(patience(1200))
def test_commands_for_a_run(tmp_path: Path) -> None:
    """Two nodes; the first stage's keeps its state where the commands look for it."""
    shutil.copy(argparse.__file__, tmp_path / "book.txt")
    seed = SeedDaemon(tmp_path / "noloco-run", "--preset", "tiny")
    address = seed.join_address()
    nodes = [
        NodeDaemon(tmp_path / name, "--join", address, "--stage", str(stage))
        for stage, name in enumerate(("noloco-state", "other"))
    ]
    for node in nodes:
        node.wait_for_step(20)
    assert_all_do(to_run("in a run"), tmp_path, address)
    assert nodes[0].process.wait(patience(60)) == 0, nodes[0].output
    assert nodes[1].leave() == 0, nodes[1].output
    assert seed.leave() == 0, seed.output


@pytest.mark.timeout(patience(1500))
def test_the_tutorial_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    """Three terminals: the seed peer, a node, and the friend's node, which leaves and comes back."""
    found, noor, sam, status, generate, back, export, alone = commands_of(
        (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    )
    seed = Terminal(found, tmp_path, "seed")
    address = seed.wait_for(r"noloco join (/ip4/127\S+)", patience(LONGEST)).group(1)
    first = Terminal(noor.replace("ADDRESS", address), tmp_path, "noor")
    first.wait_for("Serving stage", patience(LONGEST))
    second = Terminal(sam.replace("ADDRESS", address), tmp_path, "sam")
    seed.wait_for("All stages are served", patience(LONGEST))
    assert_all_do([(status, "noor"), (generate, "")], tmp_path, address)
    second.press_ctrl_c()
    again = Terminal(back, tmp_path, "back")
    again.wait_for("Serving stage", patience(LONGEST))
    assert_all_do([(export, "model"), (alone, "")], tmp_path, address)
    again.press_ctrl_c()
    first.press_ctrl_c()
    assert seed.leave(patience(60)) == 0, seed.output
