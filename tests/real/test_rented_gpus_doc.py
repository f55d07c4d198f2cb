"""docs/rented-gpus.md as a new user follows it: its very commands, on two machines, from own text to a model.

The two machines are network namespaces, B behind a router. Only the address is filled in, and the time cut.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real.daemons import Daemon, wait_until
from tests.real.mapped_network import OUTSIDE, MappedNetwork, why_unavailable

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "rented-gpus.md"
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"
MINUTES = ("--max-minutes 10", "--max-minutes 1")
FEW_ROUNDS = 3  # a busy machine did two in half a minute
PATIENCE = 240.0  # a busy machine takes that long to import torch


@dataclass(frozen=True)
class Block:
    machine: str
    stays: bool  # a command that runs on while the next ones do
    text: str


def blocks() -> list[Block]:
    """What the document tells its reader to paste, in its order."""
    found = re.findall(
        r"^```sh (A|B)( stays)?\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S
    )
    return [Block(machine, bool(stays), text) for machine, stays, text in found]


class Machine:
    """A place to paste commands: a namespace with a directory, and our commands on the path."""

    def __init__(self, directory: Path, prefix: tuple[str, ...]) -> None:
        self.directory, self._prefix = directory, prefix
        self._pasted = 0
        texts = directory / "texts"
        texts.mkdir(parents=True)
        for name in ("ast", "argparse", "inspect", "typing"):
            source = Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
            (texts / f"{name}.txt").write_text(source, encoding="utf-8")

    def rounds(self) -> int:
        """That the node here has done."""
        [events] = self.directory.glob("*/events.jsonl")
        return events.read_text(encoding="utf-8").count('"event": "round"')

    def paste(self, text: str) -> Daemon:
        self._pasted += 1
        log = self.directory / f"terminal{self._pasted}.log"
        environment = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        shell = ["env", "-C", str(self.directory), environment, "bash", "-e", "-c", text]
        return Daemon(shell, log, self._prefix)


@pytest.fixture
def terminals() -> Iterator[list[Daemon]]:
    opened: list[Daemon] = []
    yield opened
    for terminal in opened:
        terminal.kill()


def test_the_document_has_blocks_for_both_machines() -> None:
    assert {block.machine for block in blocks()} == {"A", "B"}
    assert sum(block.stays for block in blocks()) == 3


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.timeout(900)
def test_a_new_user_gets_from_text_to_a_model_that_writes(tmp_path: Path, terminals: list[Daemon]) -> None:
    with MappedNetwork({31337: 31337}) as network:
        machines = {
            "A": Machine(tmp_path / "A", network.outside),
            "B": Machine(tmp_path / "B", network.inside),
        }
        join, nodes = "", list[Any]()
        for block in blocks():
            text = "exec " * block.stays + block.text.replace(ADDRESS, join).replace(*MINUTES)
            if "noloco export" in text:
                for node in nodes:
                    node.wait_for("The run is complete here", PATIENCE)
            terminals.append(machines[block.machine].paste(text))
            terminal = terminals[-1]
            if "noloco found" in text:
                join = terminal.wait_for(rf"noloco join (/ip4/{OUTSIDE}/\S+)", PATIENCE).group(1)
            elif block.stays:
                nodes.append(terminal)
                terminal.wait_for("Serving stage", PATIENCE)
            else:
                assert terminal.process.wait(PATIENCE) == 0, terminal.output
        assert "172.17" not in "".join(terminal.output for terminal in terminals)
        status, model = terminals[-2:]
        assert len(re.findall(r"serving|finished", status.output)) == 2, status.output
        written = model.output.split("Once upon a time")[-1]
        assert (tmp_path / "B" / "model" / "config.json").exists()
        assert (tmp_path / "B" / "model" / "tokenizer.json").exists()
        assert len(written.strip()) > 0, model.output
        for machine in machines.values():
            rounds = machine.rounds()
            print(f"{rounds} rounds")
            assert rounds >= FEW_ROUNDS
        for terminal in terminals:
            assert not terminal.still_running() or terminal.leave() == 0, terminal.output
        for node in nodes:
            assert wait_until(lambda: "Left the swarm" in node.output), node.output  # noqa: B023
