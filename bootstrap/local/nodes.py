"""The node processes of a local swarm. They are forked from one process that has imported torch and compiled once.

Six processes that each import for themselves take a minute of two cores; forked ones begin to join at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from node.machine.processes import die_with_parent

PRELOADED = "bootstrap.local.preloaded"
POLL_SECONDS = 0.05
GRACE_SECONDS = 30.0  # for nodes that were asked to leave

_context = multiprocessing.get_context("forkserver")


def begin_preloading(*before: str) -> None:
    """Start the process that nodes will be forked from; it imports the modules `before` and `PRELOADED`.

    Returns at once. To be called before this process imports anything large, so that both import at the same time.
    """
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # nodes of one thread; a process with threads must not fork
    _context.set_forkserver_preload([*before, PRELOADED])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a Ctrl-C is for this process alone
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


@dataclass
class LocalNode:
    """`process` is that of its last start; `log` has the output of all."""

    name: str
    arguments: list[str]
    directory: Path
    process: multiprocessing.process.BaseProcess

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
        return "\n".join("  " + line for line in said[-lines:]) or "  (it said nothing)"


class LocalNodes:
    """Mutable state: the nodes started, in order."""

    def __init__(self, prepare: Callable[[Path], None] | None = None) -> None:
        """`prepare` is called in each node's process, with its state directory, before it begins."""
        self.all: list[LocalNode] = []
        self._prepare = prepare

    async def start(self, name: str, arguments: list[str], directory: Path) -> LocalNode:
        """`noloco-node` with these arguments, its output in `directory`; waits for the process to be forked."""
        node = LocalNode(name, arguments, directory, self._process(arguments, directory))
        await asyncio.to_thread(node.process.start)
        self.all.append(node)
        return node

    async def start_again(self, node: LocalNode) -> None:
        """The same node, from its state directory, after its process has ended."""
        node.process = self._process(node.arguments, node.directory)
        await asyncio.to_thread(node.process.start)

    def _process(self, arguments: list[str], directory: Path) -> multiprocessing.process.BaseProcess:
        return _context.Process(target=_be_node, args=(arguments, directory, self._prepare), daemon=True)

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
    """In the forked process: what `noloco-node` does, in a session of its own, so that no Ctrl-C reaches it."""
    import node.cli

    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (directory / "output.log").open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.argv = ["noloco-node", *arguments]
    if prepare is not None:
        prepare(directory)
    node.cli.main()
