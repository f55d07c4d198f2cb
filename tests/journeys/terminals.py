"""People at their terminals: what each types into a shell, and what is seen there afterwards.

Every command is a process of its own, as its user starts it. A terminal waits for what happens, never for a time, and
looks only at what came after the last command that was typed there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import psutil

from node.storage.state_directory import StateDirectory
from protocol.records.lineage import Lineage
from tests.patience import patience
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool, wait_until
from tests.unit.corpora import as_jsonl, made_up

MINUTES = patience(180.0)
LIFETIME = 10.0  # seconds of a record
INNER_STEPS = 5
AT_WORK = 60  # steps after which a stage has had so many rounds that it is waited for
MANIFEST = """
name = "friends"
stages = 2
[model]
vocab_size = 256
hidden_size = 16
layers = 2
heads = 2
intermediate_size = 32
[data]
source = "local"
sequence_tokens = 32
[inner]
optimizer = "adamw"
learning_rate = 5e-3
min_learning_rate = 1e-3
warmup_steps = 3
total_steps = 1_000_000
microbatches = 2
sequences = 4
[outer]
alpha = 0.5
beta = 0.7
gamma = 0.7
inner_steps = {inner_steps}
[limits]
microbatch_deadline = 10.0
gossip_deadline = 5.0
record_lifetime = {lifetime}
stage_return = {stage_return}
"""


class Terminal:
    """One person's terminal, on a machine that has a state directory for a node.

    Mutable state: the node's process, if one was started, and where its output and events were when the last command
    was typed.
    """

    def __init__(self, run: FriendsRun, name: str) -> None:
        self._run = run
        self.name = name
        self.directory = run.place / name
        self.node: NodeDaemon | None = None
        self._read = self._happened = 0
        self._printed = ""

    # --- what is typed ------------------------------------------------------------------------

    def types(self, command: str) -> Self:
        """Type a command: `noloco-node …` goes on in the background, `noloco …` is waited for and must succeed."""
        program, *arguments = shlex.split(command)
        self._look_from_here()
        if program == "noloco-node":
            self.node = NodeDaemon(self.directory, *arguments, "--data", self._run.text)
            return self
        assert program == "noloco"
        if arguments[0] == "node":
            arguments += ["--state-dir", str(self.directory)]
        done = run_tool(*arguments, patience=MINUTES)
        self._printed = " ".join(
            (done.stdout + done.stderr).split()
        )  # sentences go on over lines of a terminal
        assert done.returncode == 0, self._printed
        return self

    def types_until(self, command: str, pattern: str) -> Self:
        """Type it again and again until it shows that: others' news are read a few times in a record's lifetime."""
        shown = wait_until(
            lambda: re.search(pattern, self.types(command)._printed), MINUTES, self._is_running
        )
        assert shown, f"{self.name}: {pattern!r} did not appear in:\n{self.shown}"
        return self

    def presses_ctrl_c(self) -> Self:
        """Send what a terminal sends: SIGINT to the node and to all that it has started; wait until it has ended."""
        self._look_from_here()
        os.killpg(self._process.pid, signal.SIGINT)
        assert self._process.wait(MINUTES) == 0, self.shown
        return self

    def closes_the_lid(self) -> Self:
        """Stop the node's process and its p2pd where they are."""
        self._look_from_here()
        self._signal_all(signal.SIGSTOP)
        return self

    def opens_the_lid(self) -> Self:
        self._look_from_here()
        self._signal_all(signal.SIGCONT)
        return self

    def loses_the_disk(self) -> Self:
        shutil.rmtree(self.directory)
        self._read = self._happened = 0
        return self

    # --- what is seen -------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        """What the terminal has shown since the last command: its own output, or the node's."""
        log = self.directory / "output.log"
        of_node = log.read_bytes()[self._read :].decode(errors="replace") if log.exists() else ""
        return self._printed + of_node

    def sees(self, pattern: str) -> re.Match[str]:
        """Wait until that is shown."""
        found = wait_until(lambda: re.search(pattern, self.shown), MINUTES, self._is_running)
        assert found is not None, f"{self.name}: {pattern!r} did not appear in:\n{self.shown}"
        match: re.Match[str] = found
        return match

    def serves(self, stage: int) -> int:
        """Wait until the node serves the stage; returns the step from which."""
        serving = wait_until(lambda: self.since("serving"), MINUTES, self._is_running)
        assert serving, f"{self.name} does not serve:\n{self.shown}"
        assert serving[-1]["stage"] == stage, serving
        return int(serving[-1]["step"])

    def trains(self, steps: int = 20) -> Self:
        """Wait until the node has taken that many more steps."""
        goal = len(self.events("step")) + steps
        reached = wait_until(lambda: len(self.events("step")) >= goal, MINUTES, self._is_running)
        assert reached, f"{self.name} took {len(self.events('step')) - goal + steps} steps:\n{self.shown}"
        return self

    def meets(self) -> Self:
        """Wait until the node averages with another replica of its stage."""
        before = len(self._meetings())
        met = wait_until(lambda: len(self._meetings()) > before, MINUTES, self._is_running)
        assert met, f"{self.name} met nobody:\n{self.shown}"
        return self

    def since(self, event: str) -> list[dict[str, Any]]:
        """The events of that name since the last command."""
        return [e for e in self.events()[self._happened :] if e["event"] == event]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events, of these names or all, of all lives of the node."""
        path = self.directory / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        events = []
        for line in lines:
            with suppress(ValueError):  # the last one may be half written
                events.append(json.loads(line))
        return [e for e in events if not names or e["event"] in names]

    @property
    def step(self) -> int:
        return int(self.events("step")[-1]["step"])

    @property
    def address(self) -> str:
        return str(self.events("addresses")[-1]["addresses"][0])

    @property
    def peer(self) -> str:
        return self.address.rpartition("/")[2]

    def loss(self, steps: int = 100) -> float:
        """Mean training loss of the last steps that gave one."""
        losses = [e["loss"] for e in self.events("step") if e["loss"] is not None]
        return fmean(losses[-steps:])

    def saved(self, stage: int) -> tuple[int, Lineage]:
        """The step and the lineage of the checkpoint that the machine keeps of a stage."""
        checkpoint = StateDirectory(self.directory).checkpoint(self._run.run_id, stage)
        assert checkpoint is not None
        return checkpoint.state.step, checkpoint.state.lineage

    # --- its processes ------------------------------------------------------------------------

    @property
    def _process(self) -> Any:
        assert self.node is not None
        return self.node.process

    def _is_running(self) -> bool:
        return self.node is None or self.node.still_running()

    def _meetings(self) -> list[dict[str, Any]]:
        return [e for e in self.events("round") if e["partner"]]

    def _look_from_here(self) -> None:
        self._printed = ""
        self._happened = len(self.events())
        log = self.directory / "output.log"
        self._read = log.stat().st_size if log.exists() else 0

    def _signal_all(self, number: signal.Signals) -> None:
        process = psutil.Process(self._process.pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)


class FriendsRun:
    """A small run and its friends' terminals; the founder's has the seed peer.

    Mutable state: the terminals so far, and the seed peer's process.
    """

    def __init__(self, place: Path, *settings: str, stage_return: float = 20.0) -> None:
        """`settings` are options of `noloco-bootstrap`."""
        self.place = place
        self.text = as_jsonl(place / "text.jsonl", made_up(400))
        manifest = place / "friends.toml"
        contents = MANIFEST.format(inner_steps=INNER_STEPS, lifetime=LIFETIME, stage_return=stage_return)
        manifest.write_text(contents, encoding="utf-8")
        self.terminals: dict[str, Terminal] = {}
        self.seed = self.founder("run", "--manifest", str(manifest), *settings)
        self.run_id = self.id_of(self.seed)
        self.join = f"--join {self.seed.join_address()}"

    def founder(self, name: str, *arguments: str) -> SeedDaemon:
        """Type `noloco-bootstrap --state-dir NAME` with `arguments`, and wait until it is ready."""
        seed = SeedDaemon(self.place / name, *arguments)
        seed.join_address()
        return seed

    @staticmethod
    def id_of(seed: SeedDaemon) -> str:
        return seed.wait_for(r"run 'friends', id (\w+)").group(1)

    def terminal(self, name: str) -> Terminal:
        return self.terminals.setdefault(name, Terminal(self, name))

    def three_friends(self) -> tuple[Terminal, Terminal, Terminal]:
        """A and C at stage 0, B at stage 1, in training for a while. A came first: C has its weights from A."""
        a, b, c = (self.terminal(name) for name in "ABC")
        a.types(f"noloco-node {self.join} --stage 0").sees(
            "First replica of stage 0: starting from the run's seed"
        )
        b.types(f"noloco-node {self.join} --stage 1")
        a.serves(0)
        c.types(f"noloco-node {self.join} --stage 0")
        for friend in (a, b, c):
            friend.trains(AT_WORK)
        c.meets()
        return a, b, c

    def happened(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names at all friends'."""
        return [e for terminal in self.terminals.values() for e in terminal.events(*names)]

    def beginnings(self) -> list[int]:
        """The stages that began from the run's seed, in order, each as often as it did."""
        return sorted(e["stage"] for e in self.happened("initialised", "begun-anew"))

    def everyone_leaves(self) -> None:
        for terminal in self.terminals.values():
            if terminal.node is not None and terminal.node.still_running():
                terminal.presses_ctrl_c()
