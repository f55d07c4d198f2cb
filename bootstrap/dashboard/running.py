"""`noloco dashboard`: a visitor of a run, and the web server that shows what it finds."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bootstrap.creating.invitation import reach_of
from bootstrap.dashboard.board import Board, facts_of
from bootstrap.dashboard.collector import Audience, Collector
from bootstrap.dashboard.measured import follow_measured
from bootstrap.dashboard.sampling import Givers, Texts
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.credentials import addresses_to_visit
from bootstrap.inspect.observer import Observer, visit
from node.machine.limits import optional
from node.machine.listening import OPEN_TO_ALL, address_of, is_for_this_machine_alone, listen_at
from node.machine.processes import on_interrupt
from node.process.dashboard_process import PACKAGES
from protocol.errors import UserError
from protocol.run.manifest import Manifest
from protocol.supervision import Supervisor

if TYPE_CHECKING:  # these need the extra
    from bootstrap.dashboard.asking import NodeOrders
    from bootstrap.dashboard.server import Pages

REACHES = ("everywhere", "this network", "this machine")  # of an address, the farthest first


@asynccontextmanager
async def watched(
    observer: Observer,
    audience: Audience | None = None,
    *,
    by_people: bool = False,
    summary: Path | None = None,
) -> AsyncIterator[Board]:
    """The board of the run that `observer` visits, kept up to date while the block runs.

    Without an `audience` somebody watches all the time. For an audience of people texts are sampled and receipts
    added up, too. From `summary` come the losses that a local swarm measures.
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
    if summary is not None:
        following = partial(follow_measured, summary, observer.signed.run_id, board.note_measured, audience)
        supervisor.keep("reading measured losses", following, "The loss on held-out text is not shown.")
    try:
        yield board
    finally:
        await supervisor.close()


async def show_dashboard(
    join: Sequence[str], host: str, port: int, token: str = "", node: Path | None = None
) -> None:
    """Show a running swarm on a page until told to stop, a private one with a `token`.

    Its readers may ask the run for texts beside a `node`, a state directory on this machine, and order that.

    Raises `ResourceError` when the port is taken, `JoinError` when nobody answers, `UserError` without the extra.
    """
    with _listening(host, port) as listening:
        from bootstrap.dashboard.asking import NodeOrders

        is_here = is_for_this_machine_alone(listening.getsockname()[0])
        orders = NodeOrders(node, os.getuid()) if node is not None and is_here else None
        await show_at(listening, join, host, token, asks=node is not None, orders=orders)


async def show_at(
    listening: socket.socket,
    join: Sequence[str],
    named: str = "",
    token: str = "",
    summary: Path | None = None,
    *,
    asks: bool = False,
    orders: NodeOrders | None = None,
) -> None:
    """Show a running swarm at a socket that listens already. `named` and errors as of `serve` and `visit`.

    From `summary` come the losses that a local swarm measures. Readers may have texts written if it `asks`, and give
    `orders`, if any.
    """
    from bootstrap.dashboard.asking import Prompts
    from bootstrap.dashboard.server import Pages

    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    audience = Audience()
    join = addresses_to_visit(join)
    async with visit(join, token) as observer:
        require_here(observer.manifest, listening.getsockname()[0])
        async with watched(observer, audience, by_people=True, summary=summary) as board:
            asked = Prompts(Texts(observer, board, audience).write, board.note_sample) if asks else None
            pages = partial(Pages, audience=audience, join=invitation(join), prompts=asked, orders=orders)
            await _show(board, pages, listening, leaving, named)


def invitation(addresses: Sequence[str]) -> dict[str, str]:
    """The command by which others join, "line", and from where its address is reached, "reach": the farthest."""
    address = min(addresses, key=lambda one: REACHES.index(reach_of(one)))
    return {"line": shlex.join(["noloco", "join", address]), "reach": reach_of(address)}


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
        from bootstrap.dashboard.server import Pages

        await _show(board_of(files), partial(Pages, is_replay=True), listening, leaving, host)


def _listening(host: str, port: int) -> socket.socket:
    for package in PACKAGES:
        optional(package, "dashboard")
    return listen_at(host, port, "--listen")


async def _show(
    board: Board,
    pages: Callable[[Board], Pages],
    listening: socket.socket,
    leaving: asyncio.Event,
    named: str,
) -> None:
    """Serve the board on its `pages` until told to stop."""
    from bootstrap.dashboard.server import serve

    host = listening.getsockname()[0]
    print(f"Dashboard of run '{board.run['name']}': {address_of(listening)}", flush=True)
    if not is_for_this_machine_alone(host):
        print(OPEN_TO_ALL, flush=True)
    await serve(pages(board), listening, leaving, named)
