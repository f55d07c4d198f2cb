"""The plan that `noloco swarm` was asked for, and its node processes.

They are forked from one process that has imported torch and compiled the kernels once.
Six processes that each import for themselves take a minute of two cores; forked ones begin to join at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from bootstrap.traces import FILE_NAME
from node.data.opening import DataPlan
from node.data.sources import DEFAULT_FIELD
from node.machine.home import at_home
from node.machine.named import HUB
from node.machine.processes import die_with_parent
from node.process.serving import share_on
from protocol.files.keeping import descriptor_of
from protocol.run.manifest import Manifest

POLL_SECONDS = 0.05
GRACE_SECONDS = 30.0  # for nodes that were asked to leave

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class LocalPlan:
    """The plan of a local swarm; `minutes` is the time that each node trains at most."""

    manifest: Manifest
    replicas: int
    directory: Path
    minutes: float
    validation_sequences: int
    summary: Path
    picture: Path | None = None
    trace: Path | None = None  # of all nodes
    data: tuple[str, ...] = ()  # as --data; none is the run's own
    text_field: str = DEFAULT_FIELD
    tokenizer: bytes | None = None  # the run's tokenizer.json
    from_checkpoint: str | None = None  # the first replicas' weights; a directory or a name on the hub
    checkpoint_minutes: float | None = None  # None is the node's own
    devices: tuple[str, ...] = ("cpu",)  # of the nodes, in turn; several on a GPU share its memory
    listening: socket.socket | None = None  # for a page about the run
    page_named: str = ""  # its HOST:PORT as --dashboard has it
    ends_by_clock: bool = False  # after `minutes` of all nodes together, whatever they are doing then

    @property
    def data_plan(self) -> DataPlan:
        """The data of all nodes and the evaluation, which share one store of documents."""
        return DataPlan(self.data, self.text_field, self.directory / "documents", "", "--state-dir", "")

    def joining(self, address: str) -> str:
        """The command by which one more node comes from another terminal of this machine, to any stage."""
        texts = [text if text.startswith(HUB) else str(at_home(text).absolute()) for text in self.data]
        named = [word for text in texts for word in ("--data", text)]
        field = ["--text-field", self.text_field] if self.data and self.text_field != DEFAULT_FIELD else []
        return shlex.join(["noloco", "join", address, *named, *field])

    def names(self) -> dict[str, int]:
        """The stage of each node, by its name; a replica of every stage first, so that training can begin."""
        stages = range(self.manifest.stages)
        return {f"s{stage}r{replica}": stage for replica in range(self.replicas) for stage in stages}

    def _places(self) -> dict[str, str]:
        """The device of each node, by its name."""
        return dict(zip(self.names(), cycle(self.devices), strict=False))

    def arguments(self, name: str, address: str) -> list[str]:
        """The command line of the node's `noloco-node`, which joins at `address`."""
        stage, state, places = self.names()[name], self.directory / name, self._places()
        arguments = [
            "--join", address, "--name", name,
            "--stage", str(stage), "--state-dir", str(state), "--host", "127.0.0.1", "--no-relay",
            "--threads", "1", "--device", places[name],
        ]  # fmt: skip
        if share := share_on(list(places.values()), places[name]):
            arguments += ["--max-memory", share]
        if stage == 0:
            arguments += self.data_plan.flags()
            if not self.ends_by_clock:  # the others end when the first stage has
                arguments += ["--max-minutes", str(self.minutes)]
        if self.from_checkpoint is not None:
            arguments += ["--from-checkpoint", self.from_checkpoint]
        if self.trace is not None:
            arguments += ["--trace", str(state / FILE_NAME)]
        if self.checkpoint_minutes is not None:
            arguments += ["--checkpoint-minutes", str(self.checkpoint_minutes)]
        return arguments


@dataclass
class LocalNode:
    """A node on this machine; `process` is that of its last start, `log` has the output of all."""

    name: str
    arguments: list[str]
    directory: Path
    process: multiprocessing.process.BaseProcess = field(init=False)

    @property
    def log(self) -> Path:
        return self.directory / "output.log"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def last_words(self, lines: int = 8) -> str:
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join("  " + line for line in said[-lines:]) or "  (it printed nothing)"


class LocalNodes:
    """The node processes of a local swarm.

    Mutable state: the nodes started, in order.
    """

    def __init__(self, prepare: Callable[[Path], None] | None = None) -> None:
        """`prepare` is called in each node's process, with its state directory, before it begins."""
        self.all: list[LocalNode] = []
        self._prepare = prepare

    async def start(self, name: str, arguments: list[str], directory: Path) -> None:
        """Start `noloco-node` with its output in `directory`; returns once the process is forked."""
        node = LocalNode(name, arguments, directory)
        await self.start_again(node)
        self.all.append(node)

    async def start_again(self, node: LocalNode) -> None:
        """Start the node from its state directory after its process has ended."""
        arguments = (node.arguments, node.directory, self._prepare)
        node.process = _context.Process(target=_be_node, args=arguments, daemon=True)
        await asyncio.to_thread(node.process.start)

    async def stop(self) -> None:
        """Ask all to leave, wait `GRACE_SECONDS` together, then kill the rest."""
        for node in self.all:
            node.signal(signal.SIGINT)
        ends = time.monotonic() + GRACE_SECONDS
        while any(node.is_running for node in self.all):
            if time.monotonic() > ends:
                for node in self.all:
                    node.signal(signal.SIGKILL)
            await asyncio.sleep(POLL_SECONDS)


def _be_node(arguments: list[str], directory: Path, prepare: Callable[[Path], None] | None) -> None:
    """Do in the forked process what `noloco-node` does, in a session of its own, so that no Ctrl-C reaches it."""
    import node.cli

    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with os.fdopen(descriptor_of(directory / "output.log"), "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.argv = ["noloco-node", *arguments]
    if prepare is not None:
        prepare(directory)
    node.cli.main()
