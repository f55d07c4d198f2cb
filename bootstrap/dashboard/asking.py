"""What the page's reader may ask for by POST, a text or an order to the node beside it, and who may.

A stranger's page in the same browser can send a POST here as well: it cannot read the secret that this page carries,
nor send a header of that name without being asked for, and its Origin is its own.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from bootstrap.dashboard.board import Sample
from bootstrap.inspect.node_orders import ordered
from node.machine.processes import in_background
from node.watch.health import directories, is_of_several
from protocol.errors import NolocoError, UserError

SECRET_HEADER = "x-noloco-secret"
MOST_BYTES = 1_024  # of a request's body: a prompt, and some room
BODY_SECONDS = 5.0
MOST_LETTERS = 200  # of a prompt
PAUSE_SECONDS = 10.0  # from one prompt to the next, of all readers together
ANSWER_SECONDS = 60.0  # that a text may take in all
# of an order, the sentence once it was given
ORDERS = {
    "pause": "It pauses: within ten seconds the memory of its device is free.",
    "resume": "It takes its stage up again.",
    "finish": "It leaves the run, and this page ends with it.",
}


async def asked_by_own_page(request: Request, secret: str) -> str:
    """Return the body, as text, of a request of the page that this server gave out since it started.

    Raises `HTTPException` with a sentence: 403 for others, 408, 413 and 400 for a body that is late, long, cut off
    or no text.
    """
    host, origins = request.headers.get("host", ""), request.headers.getlist("origin")
    if len(origins) != 1 or origins[0] not in (f"http://{host}", f"https://{host}"):
        raise HTTPException(
            403, "Only the page itself may ask for that, opened by the name that its server has."
        )
    if not secrets.compare_digest(request.headers.get(SECRET_HEADER, "").encode(), secret.encode()):
        raise HTTPException(403, "This page is of an earlier start of its server: reload it.")
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"That is too long: {MOST_BYTES:,} bytes at most.")
    except TimeoutError:
        raise HTTPException(408, "The request did not arrive in time: send it again.") from None
    except ClientDisconnect:  # nobody reads this: anybody could fill the log with tracebacks otherwise
        raise HTTPException(400, "The request ended before its end.") from None
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise HTTPException(400, "That is no text in UTF-8.") from None


class Prompts:
    """Has the run go on with the words of a reader: one at a time, and one in `PAUSE_SECONDS` for all readers.

    Mutable state: whether one is being written, and from when on the next may be, by the loop's clock.
    """

    def __init__(self, write: Callable[[str], Awaitable[Sample]], note: Callable[[Sample], None]) -> None:
        """`write` lets a route of the run go on with a text; raises `NolocoError`. `note` shows the result to all."""
        self._write = write
        self._note = note
        self._is_writing = False
        self._next = float("-inf")

    async def answer(self, prompt: str) -> None:
        """Have a text written within `ANSWER_SECONDS`, and shown to all readers.

        Raises `HTTPException` with a sentence: 400 for no prompt or a long one, 429 when it is not its turn, 503 when
        the run does not write. Nothing is kept of one that failed; it may be asked for again.
        """
        if not 0 < len(prompt.strip()) <= len(prompt) <= MOST_LETTERS:
            raise HTTPException(400, f"Write something, {MOST_LETTERS} letters at most.")
        now = asyncio.get_running_loop().time()
        if self._is_writing or now < self._next:
            wait = max(1, round(self._next - now))
            raise HTTPException(
                429,
                f"One text in {PAUSE_SECONDS:.0f} s for all who look, one after another: try again in {wait} s.",
                {"retry-after": str(wait)},
            )
        self._is_writing, self._next = True, now + PAUSE_SECONDS
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._note(await self._write(prompt))
        except TimeoutError:
            raise HTTPException(
                503, f"No text came in {ANSWER_SECONDS:.0f} s: try again in a minute."
            ) from None
        except UserError as failure:
            raise HTTPException(503, str(failure)) from None
        except NolocoError as failure:
            raise HTTPException(503, f"No text was written ({failure}): try again.") from None
        finally:
            self._is_writing = False


class NodeOrders:
    """Gives a node of this machine the orders of `noloco node`, for readers of the page who are its user."""

    def __init__(self, state_dir: Path, user: int) -> None:
        """`state_dir` is the node's, or one of those of several nodes, which then get all orders together.

        `user` is the one that node and page run as.
        """
        self._state_dir = state_dir.resolve().parent if is_of_several(state_dir) else state_dir
        self._user = user

    async def give(self, order: str, reader: tuple[str, int], server: tuple[str, int]) -> str:
        """Give an order that came from `reader`'s end of a connection; return a sentence on what happens.

        Raises `HTTPException` with a sentence: 400 for no order, 403 for one of another user, 503 when the node does
        not do it. Orders may be repeated.
        """
        if order not in ORDERS:
            raise HTTPException(400, f"No node takes that order; it takes {', '.join(ORDERS)}.")
        if await in_background("reader's user", user_at, reader, server) != self._user:
            raise HTTPException(
                403,
                "Only the user that the node runs as may order that here: use `noloco node` as that user.",
            )
        try:
            answers = await in_background("order", ordered, directories(self._state_dir), order)
        except UserError as failure:
            raise HTTPException(503, str(failure)) from None
        costs = [str(report["last"]) for _, report in answers if report.get("last")]
        return " ".join([*costs, ORDERS[order]])


TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
NO_INODE = "0"


def user_at(end: tuple[str, int], other: tuple[str, int]) -> int | None:
    """Return the user whose process has `end` of a connection within this machine; None where nobody can say.

    Linux alone lists it (proc(5), /proc/net/tcp). An end that its process has closed is nobody's: it has no inode any
    more, and Linux lists it as root's.
    """
    wanted = set(zip(_listed(end), _listed(other), strict=True))
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if (fields[1], fields[2]) in wanted and fields[9] != NO_INODE:
                return int(fields[7])
    return None


def _listed(place: tuple[str, int]) -> list[str]:
    """The place as the tables of both families have it: 32-bit words, each in the machine's order."""
    host, port = place
    if ":" in host:
        packed = [socket.inet_pton(socket.AF_INET6, host)] * 2
    else:
        short = socket.inet_pton(socket.AF_INET, host)
        packed = [short, bytes(10) + b"\xff\xff" + short]
    words = ("".join(one[i : i + 4][::-1].hex().upper() for i in range(0, len(one), 4)) for one in packed)
    return [f"{word}:{port:04X}" for word in words]
