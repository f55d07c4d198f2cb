"""How processes end: children never outlive their parent, and Ctrl-C and SIGTERM first ask for a graceful end.

A second signal ends the process at once. Whoever presses Ctrl-C has time, and a second one. SIGTERM comes from a
machine or a container that shuts down, and docker, like others, kills ten seconds later: after less than that, the
process ends, whatever is still to be done.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

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
        """Ask all to leave, by Ctrl-C or as whoever asked this process: see `on_interrupt`."""
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


EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143  # 128 and the signal's number, as a shell says it
PATIENCE = {signal.SIGINT: 40.0, signal.SIGTERM: 7.5}  # seconds that a graceful end may take
LAST_MOMENT = 9.0  # seconds after SIGTERM: what is not done by now is left undone


def on_interrupt(stop: Callable[[signal.Signals], None]) -> None:
    """Call `stop` with the first signal; it then has `PATIENCE`.

    At the second, exit at once without saving; so too `LAST_MOMENT` after a SIGTERM.
    """
    asked = False

    def handle(number: signal.Signals) -> None:
        nonlocal asked
        if asked:
            _exit("Left at once; what was in flight here is lost to the swarm.", EXIT_INTERRUPTED)
        asked = True
        if number == signal.SIGTERM:
            _exit_in_the_end()
        stop(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)


def end_process() -> NoReturn:
    """Exit code 0, when everything is closed: to take torch apart first costs over a second of processor time."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_in_the_end() -> None:
    """A thread of its own: the loop may be the one that hangs."""
    sentence = "There was no time to end everything; the last checkpoint is what a restart goes on from."
    timer = threading.Timer(LAST_MOMENT, _exit, (sentence, EXIT_TERMINATED))
    timer.daemon = True
    timer.start()


def _exit(sentence: str, code: int) -> None:
    print(sentence, file=sys.stderr)
    os._exit(code)  # p2pd notices the closed pipe and ends by itself
