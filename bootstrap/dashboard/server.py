"""The web server of the dashboard: one page and what it shows, for anybody who reaches it.

Beside a node of this machine the page may ask for texts and give that node orders, see `asking`; else nothing can be
changed by it.

Everything that members wrote leaves here as JSON, which the page puts into text, never into markup.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bootstrap.dashboard.asking import NodeOrders, Prompts, asked_by_own_page
from bootstrap.dashboard.board import Board
from bootstrap.dashboard.collector import Audience
from bootstrap.dashboard.connections import MOST_CONNECTIONS, PatientConnection
from bootstrap.dashboard.hosts import AllowedHosts, OnlyTheseHosts
from bootstrap.dashboard.link_matrix import matrix_of
from bootstrap.dashboard.metrics import exposition
from bootstrap.inspect.verdict import in_a_word
from protocol.supervision import all_of

MOST_READERS = 64  # streams at once
UPDATE_SECONDS = 0.25  # between two looks for news
SILENCE_SECONDS = 10.0  # a comment after that, so that a connection which has died is noticed
CLOSING_SECONDS = 1
UNHEARD_SECONDS = 30.0
PAGE = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    **{
        name: (name, "text/javascript")
        for name in ("page.js", "live.js", "chart.js", "stages.js", "lists.js")
    },
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Pages:
    """The server's answers. Mutable state: how many streams are open, what was told last, whether they are to end."""

    def __init__(
        self,
        board: Board,
        audience: Audience | None = None,
        is_replay: bool = False,
        now: Callable[[], float] = time.time,
        join: Mapping[str, str] | None = None,
        prompts: Prompts | None = None,
        orders: NodeOrders | None = None,
    ) -> None:
        """`now` is the wall clock that the board goes by; the `audience` hears of everybody who watches.

        `join` is the `invitation` to the run, where it can be joined; `prompts` and `orders` are those that the page
        may ask for, if any.
        """
        self._board = board
        self._audience = audience or Audience()
        self._told: tuple[int, int, str] | None = None  # from which version, to which, and the change as JSON
        self._now = now
        self._join = join
        self._prompts = prompts
        self._orders = orders
        self._secret = secrets.token_urlsafe(32)
        self._is_replay = is_replay
        self._life = secrets.token_hex(4)  # versions of another process are no versions of this one
        self._readers = 0
        self.closing = asyncio.Event()

    def app(self) -> Starlette:
        files = [Route(f"/{path}", self._file(*entry)) for path, entry in PAGE.items()]
        answers: dict[str, Callable[[Request], object]] = {
            "/state": self.state,
            "/live": self.live,
            "/picture": self.picture,
            "/links": self.links,
            "/metrics": self.metrics,
            "/healthz": self.health,
        }
        routes = [Route(path, answer) for path, answer in answers.items()]
        if self._prompts is not None:
            routes.append(Route("/write", self.write, methods=["POST"]))
        if self._orders is not None:
            routes.append(Route("/order", self.order, methods=["POST"]))
        return Starlette(
            routes=[*files, *routes], middleware=[Middleware(_Headers), Middleware(GZipMiddleware)]
        )

    def _file(self, name: str, kind: str) -> Callable[[Request], object]:
        contents = resources.files("bootstrap.dashboard").joinpath("page", name).read_bytes()
        if name == "index.html":
            contents = contents.replace(b"SECRET", self._secret.encode())

        async def answer(request: Request) -> Response:
            return Response(contents, media_type=kind)

        return answer

    async def state(self, request: Request) -> Response:
        """Answer with everything, to begin with."""
        change = self._board.change_since(0)
        may = {"asks": self._prompts is not None, "orders": self._orders is not None}
        run = {**self._board.run, "replay": self._is_replay, "join": self._join, **may}
        return _json({"run": run, "cursor": self.cursor(change["version"]), **change})

    def cursor(self, version: int) -> str:
        """The mark that a reader shows to be told what came after a version."""
        return f"{self._life}-{version}"

    def version_of(self, cursor: str) -> int:
        """The version of a cursor; 0, nothing, where it is none of this process's."""
        life, _, version = cursor.partition("-")
        is_one = life == self._life and version.isascii() and version.isdigit() and len(version) < 16
        return int(version) if is_one else 0

    async def live(self, request: Request) -> Response:
        """Server-sent events: what has changed since the version that the browser has."""
        if self._readers >= MOST_READERS:
            return PlainTextResponse("Too many browsers look at this dashboard. Close one.", 503)
        asked = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return StreamingResponse(self._changes(self.version_of(asked)), media_type="text/event-stream")

    async def _changes(self, since: int) -> AsyncIterator[str]:
        self._readers += 1
        loop, quiet = asyncio.get_running_loop(), 0.0
        try:
            with self._audience.watching():
                while not self.closing.is_set():
                    if self._board.version != since:
                        change, since, quiet = self._change(since), self._board.version, 0.0
                        yield f"id: {self.cursor(since)}\ndata: {change}\n\n"
                    elif quiet >= SILENCE_SECONDS:
                        quiet = 0.0
                        yield ": still here\n\n"
                    # all at the same moments, so that what is new is put into words once
                    await asyncio.sleep(UPDATE_SECONDS - loop.time() % UPDATE_SECONDS)
                    quiet += UPDATE_SECONDS
        finally:
            self._readers -= 1

    def _change(self, since: int) -> str:
        """The change since a version, as JSON."""
        if self._told is None or self._told[:2] != (since, self._board.version):
            change = self._board.change_since(since)
            self._told = since, change["version"], _packed(change)
        return self._told[2]

    async def picture(self, request: Request) -> Response:
        """The run as it was at ?time=, wall clock."""
        try:
            moment = float(request.query_params.get("time", ""))
        except ValueError:
            moment = math.nan
        if not math.isfinite(moment):
            return PlainTextResponse("Ask for ?time=SECONDS, since 1970.", 400)
        kept = self._board.picture(moment)
        if kept is None:
            return PlainTextResponse("Nothing is kept yet.", 404)
        return Response(kept, media_type="application/json")

    async def write(self, request: Request) -> Response:
        """Have a text written that goes on with the body, see `Prompts`."""
        assert self._prompts is not None
        await self._prompts.answer(await asked_by_own_page(request, self._secret))
        return PlainTextResponse("The text is in the list below.")

    async def order(self, request: Request) -> Response:
        """Give the node beside the page the order in the body, see `NodeOrders`."""
        assert self._orders is not None
        order = await asked_by_own_page(request, self._secret)
        client, server = request.scope["client"], request.scope["server"]
        return PlainTextResponse(await self._orders.give(order, tuple(client), tuple(server)))

    async def links(self, request: Request) -> Response:
        return _json(matrix_of(self._board.sightings()))

    async def health(self, request: Request) -> Response:
        """Say in a word how the run does; 503 when nothing has been heard of it for `UNHEARD_SECONDS`."""
        is_fresh = self._is_replay or self._now() - self._board.now.time < UNHEARD_SECONDS
        word = in_a_word(self._board.findings) if is_fresh else "nothing is heard of the run"
        return PlainTextResponse(f"{word}\n", 200 if is_fresh else 503)

    async def metrics(self, request: Request) -> Response:
        text, kind = exposition(self._board)
        return Response(text, headers={"content-type": kind})


def _packed(contents: object) -> str:
    return json.dumps(contents, allow_nan=False, separators=(",", ":"))


def _json(contents: object) -> Response:
    return Response(_packed(contents), media_type="application/json")


class _Headers:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


class _Server(uvicorn.Server):
    """Leaves signals to the command that runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(pages: Pages, listening: socket.socket, leaving: asyncio.Event, named: str = "") -> None:
    """Answer browsers on `listening` until `leaving` is set; then streams end, within a second or two.

    `named` is the HOST:PORT that a person gave for it: by that host browsers may ask, too.
    """
    hosts = AllowedHosts(listening.getsockname()[0], named)
    config = uvicorn.Config(
        _Headers(OnlyTheseHosts(pages.app(), hosts)),
        http=PatientConnection,
        log_level="error",  # anybody could have it warn of invalid requests without end
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # anybody could claim another's end of a connection, by which orders are allowed
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = _Server(config)

    async def end() -> None:
        await leaving.wait()
        pages.closing.set()
        server.should_exit = True

    await all_of(server.serve([listening]), end())
