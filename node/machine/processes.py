"""Child processes that never outlive their parent, whatever happens to it."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.supervision import all_of

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_SECONDS = 30.0


def die_with_parent() -> None:
    """In the child, before exec: the kernel kills it when the parent dies, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    name: str
    log: Path | None
    process: asyncio.subprocess.Process

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None


class Children:
    """Mutable state: the processes started, in order."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    async def start(
        self,
        name: str,
        command: list[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a command. Its output goes to `log`, without one to where the parent's goes; its environment is the
        parent's unless one is given. A session of its own: a Ctrl-C does not reach it.
        """
        with nullcontext() if log is None else log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        child = Child(name, log, process)
        self.all.append(child)
        return child

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ask all to leave, by Ctrl-C or as whoever asked this process: see `node.machine.signals`."""
        for child in self.all:
            self._signal(child, number)

    async def stop(self) -> None:
        """Ask all to leave, wait `GRACE_SECONDS` together, then kill the rest."""
        self.interrupt()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await self._ended()
        self.kill()
        await self._ended()

    async def _ended(self) -> None:
        await all_of(*(child.process.wait() for child in self.all))

    def kill(self) -> None:
        for child in self.all:
            self._signal(child, signal.SIGKILL)

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.is_running:
            child.process.send_signal(number)
