"""The daemon's health, on a socket that its state directory names; `python -m node.watch.health DIR` asks for it.

The daemon itself is asked, in its event loop: a process that is there and does nothing any more does not pass. The
one who asks imports little, so that asking every half minute costs little. The same socket takes orders, see
`noloco node`: a JSON object a line, {"order": "pause"}, where need be with more in it, and one in answer to each.
Only the user who runs the daemon reaches it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from node.machine.named import shown
from protocol.errors import NolocoError, TransportDown
from protocol.files.folders import folder_for_sockets, folders_of_others
from protocol.files.keeping import replace_whole

if TYPE_CHECKING:
    from protocol.supervision import Supervisor
    from protocol.transport.base import Transport

DEADLINE = 5.0  # seconds for the daemon to answer
SOCKET_FILE = "health.socket"  # in the state directory: where the daemon listens
DIRECTORY_FILE = "directory"  # beside the socket: the state directory
_PREFIX = "noloco-health-"
MAX_ANSWER = 64 * 1024
MAX_ORDER = 4096  # bytes of a line
MAX_ORDERS = 100  # of one connection, each within `DEADLINE`
MAX_FAILURE = 300  # characters told of what a part failed with
STATUS = "status"  # the order that changes nothing
# "name" is the node's, where its volunteer gave it one
# "healthy" says whether all is well, "state" what the daemon does, "reason" what is wrong
Report = dict[str, Any]
# each gets all that was said beside the order; raises `NolocoError` for what cannot be done, with nothing done
Orders = Mapping[str, Callable[[Report], None]]


class Unwell(Exception):
    """The daemon did not answer, or reports a problem; the text says which."""


@asynccontextmanager
async def health_served(
    directory: Path, report: Callable[[], Report], orders: Orders = MappingProxyType({})
) -> AsyncIterator[None]:
    """Answer health checks and orders, each with a fresh report, while the block runs.

    Raises `ResourceError` where no folder can have the socket.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ValueError, TimeoutError):  # whoever asked has gone, or talks nonsense
            try:
                for _ in range(MAX_ORDERS):
                    async with asyncio.timeout(DEADLINE):
                        if not (line := await reader.readline()):
                            break
                    refusal = _obey(line, orders)
                    writer.write(json.dumps(report() | refusal).encode() + b"\n")
                    await writer.drain()
            finally:
                writer.close()
                await writer.wait_closed()

    named = directory / SOCKET_FILE
    # not in the state directory itself, whose path may be too long for a socket, or on no local disk
    # a daemon of the same state directory that was killed has left its own: there can be no other one
    with suppress(OSError):
        former = Path(os.fsdecode(named.read_bytes())).parent
        if former.parent in folders_of_others() and former.name.startswith(_PREFIX):
            shutil.rmtree(former, ignore_errors=True)
    place = folder_for_sockets(_PREFIX)
    try:
        server = await asyncio.start_unix_server(answer, str(place / "socket"), limit=MAX_ORDER)
        (place / "socket").chmod(0o600)
        _tell_each_other(directory, place)
        async with server:
            yield
    finally:
        named.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def _tell_each_other(directory: Path, place: Path) -> None:
    """Write in the state directory where the socket is, and beside the socket which state directory that is."""
    replace_whole(place / DIRECTORY_FILE, os.fsencode(directory.resolve()))
    replace_whole(directory / SOCKET_FILE, os.fsencode(place / "socket"))


def _obey(line: bytes, orders: Orders) -> Report:
    """Carry out what it says; "refused" with the reason when that is nothing that this daemon does, "cannot" with it
    when it does, and cannot now.

    Raises `ValueError` for what is no order.
    """
    said = json.loads(line)
    order = str(said.get("order")) if isinstance(said, dict) else ""
    if order in orders:
        try:
            orders[order](said)
        except NolocoError as error:
            return {"cannot": str(error)}
    elif order != STATUS:
        return {"refused": f"this daemon has no order {order[:40]!r}"}
    return {}


def reached_at(transport: Transport) -> Report:
    """The part of a report that every peer gives: where others join through it; unhealthy while it has no network."""
    try:
        return {"healthy": True, "addresses": transport.addresses_to_join()}
    except TransportDown as problem:
        return {"healthy": False, "reason": str(problem)}


def report_of(state: str, supervisor: Supervisor, transport: Transport) -> Report:
    """The report of a node or a seed peer: who it is, what it does, its parts, whether it has its network. In an
    event loop.
    """
    parts = parts_told(supervisor, asyncio.get_running_loop().time())
    return {"peer": transport.peer_id, "state": state, "parts": parts, **reached_at(transport)}


def parts_told(supervisor: Supervisor, now: float) -> list[Report]:
    """The parts that run in the background at loop time `now`: for how long, how often restarted, and why last."""
    return [
        {
            "part": part.name,
            "state": part.state,
            "seconds": round(now - part.since, 1),
            "restarts": part.restarts,
            "failure": part.failure[:MAX_FAILURE],
        }
        for part in supervisor.parts()
    ]


def ask(directory: Path, deadline: float = DEADLINE) -> Report:
    """The report of a daemon that is well. Raises `Unwell` when none comes, or it says that something is wrong."""
    report = look(directory, deadline)
    if not report.get("healthy"):
        raise Unwell(f"the daemon of {directory} says: {report.get('reason')}")
    return report


def look(
    directory: Path,
    deadline: float = DEADLINE,
    order: str = STATUS,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> Report:
    """The report of the daemon of `directory`, after it was given an order, with what is said beside it.

    Raises `Unwell` when none comes within `deadline` seconds; whether the order was carried out is then unknown.
    """
    try:
        path = os.fsdecode((directory / SOCKET_FILE).read_bytes())
    except OSError:
        raise Unwell(
            f"no daemon runs with the state directory {shown(directory)}, or it just started"
        ) from None
    ends, answer = time.monotonic() + deadline, b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(deadline)
            connection.connect(path)
            connection.sendall(json.dumps({**said, "order": order}).encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) < MAX_ANSWER:
                connection.settimeout(max(1e-3, ends - time.monotonic()))
                if not (part := connection.recv(MAX_ANSWER)):
                    break
                answer += part
        report = json.loads(answer)
        if not isinstance(report, dict):
            raise ValueError("its answer is not a report")
    except (OSError, ValueError) as error:
        raise Unwell(f"the daemon of {directory} does not answer ({error})") from None
    return report


def directories(directory: Path) -> list[Path]:
    """The state directories to ask: that one, or those of the nodes that `--device all` keeps in it."""
    several = sorted(path.parent for path in directory.glob(f"device-*/{SOCKET_FILE}"))
    return several if several and not (directory / SOCKET_FILE).exists() else [directory]


def running_here() -> list[Path]:
    """The directories of the daemons that this user runs on this machine, and of some that were killed."""
    found = []
    for place in sorted(path for folder in folders_of_others() for path in folder.glob(f"{_PREFIX}*")):
        with suppress(OSError, ValueError):
            if place.lstat().st_uid == os.geteuid() and not place.is_symlink():
                found.append(Path(os.fsdecode((place / DIRECTORY_FILE).read_bytes())))
    return found


def is_of_several(directory: Path) -> bool:
    """Return whether it is that of one of the nodes that one command started."""
    return directory.resolve() in [path.resolve() for path in directory.resolve().parent.glob("device-*")]


def main() -> None:
    """Print one line for each daemon; exit code `DONE` when all are well, `NO` otherwise."""
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m node.watch.health STATE-DIRECTORY")
    try:
        for directory in directories(Path(sys.argv[1])):
            print(json.dumps(ask(directory)))
    except Unwell as problem:
        sys.exit(f"unhealthy: {problem}")


if __name__ == "__main__":
    main()
