"""`--dashboard`: a page about the run beside a peer, in a process of its own.

Whoever looks at the page shares neither the event loop that answers partners nor the memory of what trains: the page
is a visitor of the run like any other, that joins it through this peer. In a private run it gets a token, in its
environment, since others see a process's arguments.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from node.machine.environment import ENVIRONMENT_PREFIX
from node.machine.limits import optional
from node.machine.listening import listen_at, parse_listen
from node.machine.processes import Children
from protocol.errors import TransportDown, UserError
from protocol.supervision import Supervisor, Tell
from protocol.transport.base import Transport

FLAG = "--dashboard"
PACKAGES = ("starlette", "uvicorn", "prometheus_client")
POLL_SECONDS = 0.5


@asynccontextmanager
async def dashboard_beside(
    listen: str,
    addresses: Callable[[], Sequence[str]],
    tell: Tell | None = None,
    token: Callable[[], str] = lambda: "",
    node: Path | None = None,
) -> AsyncIterator[None]:
    """Serve a page at `listen`, HOST:PORT, while the block runs; none where that is empty.

    `addresses` are those at which this peer can be joined, none as long as it cannot. `token` is what the page visits
    a private run with, asked for at each start of it; empty for an open one. `node` is the state directory of the
    node that the page is beside, for readers who ask it for something. The page is started again when it ends.
    Raises `UserError` when a package is missing, `ResourceError` when the port is taken.
    """
    if not listen:
        yield
        return
    for package in PACKAGES:
        optional(package, "dashboard")
    listen_at(*parse_listen(listen), FLAG).close()
    supervisor = Supervisor(tell)
    beside = [] if node is None else [f"--beside={node}"]
    supervisor.keep(
        "the dashboard",
        lambda: _run([f"--listen={listen}", *beside], addresses, token),
        "Nobody can look at it.",
    )
    try:
        yield
    finally:
        await supervisor.close()


async def _run(
    options: Sequence[str], addresses: Callable[[], Sequence[str]], token: Callable[[], str]
) -> None:
    """Run the page once, until it ends by itself: then raises `UserError`. Cancelled, it asks the page to end."""
    own = addresses()
    while not own:
        await asyncio.sleep(POLL_SECONDS)
        own = addresses()
    joins = [f"--join={address}" for address in own]
    command = [sys.executable, "-m", "bootstrap.tools_cli", "dashboard", *options, *joins]
    environment, children = dict(os.environ), Children()
    if shown := token():
        environment[f"{ENVIRONMENT_PREFIX}TOKEN"] = shown
    try:
        await children.start("dashboard", command, environment)
        await children.all[0].process.wait()
    finally:
        children.interrupt(signal.SIGTERM)
    raise UserError("its process ended; what it said is above")


def own_addresses(transport: Transport, port: int = 0, host: str = "0.0.0.0") -> list[str]:
    """The addresses at which a process on this machine joins through `transport`, which listens on `port` of `host`.

    Port 0 is not known. Where nobody else can dial it, those of peers at which others can join come before its own.
    """
    try:
        announced = transport.addresses()
    except TransportDown:
        return []
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    kind = "ip6" if ":" in near else "ip4"
    here = [f"/{kind}/{near}/tcp/{port}/p2p/{transport.peer_id}"] if port else []
    return list(dict.fromkeys([*here, *transport.joined_through, *announced]))
