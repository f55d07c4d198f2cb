"""The page about a local swarm: an address from its first second on, and a process forked as the nodes are.

That process has torch already and shares its memory. The address is listened at before the process is there and while
it is started again: a browser that comes early waits for it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

from node.command import run_async
from node.machine.limits import optional
from node.machine.listening import HERE, OPEN_TO_ALL, address_of, is_for_this_machine_alone, listen_at
from node.machine.listening import require_place as require_host_and_port
from node.machine.processes import die_with_parent
from node.process.dashboard_process import FLAG, PACKAGES, POLL_SECONDS
from protocol.errors import UserError
from protocol.files.installation import extra_line
from protocol.files.keeping import descriptor_of
from protocol.supervision import Supervisor, Tell, all_of

NOWHERE = "none"
NICENESS = 5  # training goes first where cores are short
END_SECONDS = 5.0  # for a process that was asked to end; it takes one or two

_context = multiprocessing.get_context("forkserver")


def require_place(place: str) -> None:
    """Refuse what is neither HOST:PORT nor `NOWHERE`. Raises `UserError`."""
    if place != NOWHERE:
        require_host_and_port(place, FLAG)


def open_page(place: str, say: Callable[[str], None]) -> socket.socket | None:
    """Listen at `place`, or at a free port of this machine where that is empty, and say the address.

    None where no page is wanted, or none was asked for and a package is missing. Raises `ResourceError` when the port
    is taken, `MissingPackage` for a page that was asked for.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if place == NOWHERE:
        return None
    if missing and not place:
        say(f"For a web page of the run: {extra_line('dashboard')}.")
        return None
    for package in missing:
        optional(package, "dashboard")
    host, port = require_host_and_port(place, FLAG) if place else (HERE, 0)
    listening = listen_at(host, port, FLAG)
    say(f"See it at {address_of(listening)}")
    if not is_for_this_machine_alone(host):
        say(OPEN_TO_ALL)
    return listening


class LocalPage:
    """Runs the dashboard of a local swarm in a process of its own and starts it again when it ends.

    Mutable state: the supervisor that starts the page again when it ends, and its processes so far.
    """

    def __init__(
        self,
        listening: socket.socket | None,
        log: Path,
        tell: Tell,
        named: str = "",
        summary: Path | None = None,
    ) -> None:
        """Prepare the page; without a socket there is none. Its output goes to `log`: the terminal has the table.

        `named` is its HOST:PORT as `--dashboard` has it; in `summary` the swarm writes the losses that it measures.
        """
        self._listening = listening
        self._named = named
        self._summary = summary
        self._log = log
        self._supervisor = Supervisor(tell)
        self._lives: list[BaseProcess] = []

    def start(self, addresses: Callable[[], Sequence[str]]) -> None:
        """Returns at once. `addresses` are those at which the run is joined, none as long as it cannot be."""
        if (listening := self._listening) is not None:
            self._supervisor.keep(
                "the dashboard", lambda: self._run(listening, addresses), "Nobody can look at it."
            )

    async def _run(self, listening: socket.socket, addresses: Callable[[], Sequence[str]]) -> None:
        """Run the page's process until it ends by itself, and raise `UserError` then."""
        join = addresses()
        while not join:
            await asyncio.sleep(POLL_SECONDS)
            join = addresses()
        told = listening, join, self._named, self._log, self._summary
        life = _context.Process(target=_be_page, args=told, daemon=True)
        self._lives.append(life)
        await asyncio.to_thread(life.start)
        await _end_of(life)
        raise UserError(f"its process ended; {self._log} says why")

    async def close(self) -> None:
        """End the page: none of its processes runs when this returns, after `END_SECONDS` at most."""
        await self._supervisor.close()
        started = [life for life in self._lives if life.pid is not None]
        for life in started:
            life.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await all_of(*(_end_of(life) for life in started))
        for life in started:
            life.kill()


async def _end_of(process: BaseProcess) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)


def _be_page(
    listening: socket.socket, join: Sequence[str], named: str, log: Path, summary: Path | None
) -> None:
    """Do in the forked process what `noloco dashboard` does, in its own session, so that no Ctrl-C reaches it."""
    die_with_parent()
    os.setsid()
    os.nice(NICENESS)
    with os.fdopen(descriptor_of(log), "ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    from bootstrap.dashboard.running import show_at

    with listening:
        run_async(show_at(listening, join, named, summary=summary, asks=True))
