"""`noloco dashboard`: a visitor of a run, and the web server that shows what it finds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bootstrap.dashboard.board import Board, facts_of
from bootstrap.dashboard.collector import Audience, Collector
from bootstrap.dashboard.sampling import Givers, Texts
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.observer import Observer, visit
from node.dashboard_process import PACKAGES
from node.machine.limits import optional
from node.machine.listening import OPEN_TO_ALL, address_of, is_for_this_machine_alone, listen_at
from node.machine.processes import on_interrupt
from protocol.errors import UserError
from protocol.manifest import Manifest
from protocol.supervision import Supervisor


@asynccontextmanager
async def watched(
    observer: Observer, audience: Audience | None = None, *, by_people: bool = False
) -> AsyncIterator[Board]:
    """The board of the run that `observer` visits, kept up to date while the block runs.

    Without an `audience` somebody watches all the time. For an audience of people texts are sampled and receipts
    added up, too.
    """
    audience = audience or Audience(watchers=1)
    manifest = observer.manifest
    wording = Wording(
        manifest.stages,
        foreign=observer.view.of_other_protocols,
        total_steps=manifest.inner.total_steps,
    )
    board = Board(facts_of(observer.manifest, observer.signed.run_id), wording)
    supervisor = Supervisor()
    collector = Collector(observer, board, supervisor, audience)
    collector.start()
    if by_people:
        texts, givers = Texts(observer, board, audience), Givers(observer, board, audience)
        supervisor.keep("sampling text", texts.run, "No text is shown.")
        supervisor.keep("adding up receipts", givers.run, "Who gave how much is not shown.")
    try:
        yield board
    finally:
        await supervisor.close()


async def show_dashboard(join: Sequence[str], host: str, port: int, token: str = "") -> None:
    """Show a running swarm on a page until told to stop, a private one with a `token`.

    Raises `ResourceError` when the port is taken, `JoinError` when nobody answers, `UserError` without the extra.
    """
    with _listening(host, port) as listening:
        await show_at(listening, join, host, token)


async def show_at(listening: socket.socket, join: Sequence[str], named: str = "", token: str = "") -> None:
    """Show a running swarm at a socket that listens already. `named` and errors as of `serve` and `visit`."""
    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    audience = Audience()
    async with visit(join, token) as observer:
        require_here(observer.manifest, listening.getsockname()[0])
        async with watched(observer, audience, by_people=True) as board:
            await _show(board, listening, leaving, named, audience)


def require_here(manifest: Manifest, host: str) -> None:
    """Refuse to show a private run beyond this machine: the page asks nobody for a token. Raises `UserError`."""
    if manifest.access.private and not is_for_this_machine_alone(host):
        raise UserError(
            f"A page at {host} would show the private run '{manifest.name}' to others: let it listen at 127.0.0.1, "
            "and look through ssh -L from elsewhere."
        )


async def replay(files: Sequence[Path], host: str, port: int) -> None:
    """Show a run that is over, from its nodes' events.jsonl. Raises `StateError` for files that hold none."""
    from bootstrap.dashboard.replaying import board_of

    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    with _listening(host, port) as listening:
        await _show(board_of(files), listening, leaving, host)


def _listening(host: str, port: int) -> socket.socket:
    for package in PACKAGES:
        optional(package, "dashboard")
    return listen_at(host, port, "--listen")


async def _show(
    board: Board,
    listening: socket.socket,
    leaving: asyncio.Event,
    named: str,
    audience: Audience | None = None,
) -> None:
    """Serve the board until told to stop. A run that is over has no `audience`: it asks nobody."""
    from bootstrap.dashboard.server import Pages, serve

    host = listening.getsockname()[0]
    print(f"Dashboard of run '{board.run['name']}': {address_of(listening)}", flush=True)
    if not is_for_this_machine_alone(host):
        print(OPEN_TO_ALL, flush=True)
    pages = Pages(board, audience or Audience(), is_replay=audience is None)
    await serve(pages, listening, leaving, named)
