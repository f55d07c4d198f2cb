"""The dashboard's web server: what it answers, to how many, and how it ends; where it listens; a node's own."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bootstrap.dashboard.running import watched
from bootstrap.dashboard.server import MOST_READERS, Pages, serve
from node.machine.listening import address_of, is_for_this_machine_alone, listen_at, parse_listen
from protocol.errors import ResourceError
from tests.made_up_members import MadeUpSwarm
from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon, wait_until
from tests.swarm.micro import micro_manifest, until


@asynccontextmanager
async def dashboard(
    members: int = 4, **settings: Any
) -> AsyncIterator[tuple[MadeUpSwarm, str, asyncio.Event]]:
    """(members, address of their dashboard, the event that ends it); the settings are those of `Pages`."""
    swarm = MadeUpSwarm(
        micro_manifest(limits__record_lifetime=300.0), asyncio.get_running_loop().time, age=100.0
    )
    await swarm.start(members)
    leaving = asyncio.Event()
    observer = await swarm.observer()
    async with watched(observer) as board:
        await until(lambda: board.now.members == members)
        with listen_at("127.0.0.1", 0, "--listen") as listening:
            pages = Pages(board, now=observer.transport.now, **settings)
            serving = asyncio.create_task(serve(pages, listening, leaving))
            yield swarm, address_of(listening), leaving
            leaving.set()
            await asyncio.wait_for(serving, 5.0)


async def get(url: str) -> tuple[int, dict[str, str], bytes]:
    def ask() -> tuple[int, dict[str, str], bytes]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    return await asyncio.to_thread(ask)


@asynccontextmanager
async def stream(address: str, query: str = "") -> AsyncIterator[tuple[asyncio.StreamReader, bytes]]:
    """An open stream of events, and the first line of its head."""
    port = int(address.rstrip("/").rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /live{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
        yield reader, head.split(b"\r\n")[0]
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def next_change(reader: asyncio.StreamReader) -> dict[str, Any]:
    while True:
        line = await asyncio.wait_for(reader.readline(), 5.0)
        if line.startswith(b"data: "):
            change: dict[str, Any] = json.loads(line[6:])
            return change


async def test_every_answer_forbids_foreign_content() -> None:
    async with dashboard() as (_, address, _leaving):
        for path in (
            "",
            "page.js",
            "page.css",
            "state",
            "links",
            "metrics",
            "nothing",
            "picture?time=x",
            "healthz",
        ):
            _, headers, _ = await get(address + path)
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert "http" not in policy
            assert headers["x-content-type-options"] == "nosniff"


async def test_what_is_asked_for_wrongly_is_refused() -> None:
    async with dashboard() as (_, address, _leaving):
        wanted = {
            "picture": 400,
            "picture?time=soon": 400,
            "picture?time=1e400": 400,
            "../pyproject.toml": 404,
            "page/": 404,
        }
        assert {path: (await get(address + path))[0] for path in wanted} == wanted
        async with stream(address, "?since=" + "9" * 5_000) as (reader, _):
            assert (await next_change(reader))["whole"]


async def test_a_stream_tells_what_changes_and_goes_on_where_it_was() -> None:
    async with dashboard() as (swarm, address, _leaving):
        begun = json.loads((await get(address + "state"))[2])
        assert len(begun["rows"]) == 4
        killed = swarm.members[0]
        async with stream(address, f"?since={begun['cursor']}") as (reader, _), asyncio.timeout(20):
            change = await next_change(reader)
            assert not change["whole"]
            await killed.kill()
            while not any(row["id"] == killed.peer and row["silent"] for row in change["rows"]):
                change = await next_change(reader)


async def test_a_browser_of_an_earlier_life_of_the_server_gets_everything() -> None:
    """Though this one's version has passed what it had: what is gone meanwhile would stay on the page."""
    async with dashboard() as (_, address, _leaving):
        begun = json.loads((await get(address + "state"))[2])
        life, _, version = begun["cursor"].partition("-")
        other = f"{'0' * len(life)}-{max(1, int(version) - 1)}"
        for cursor in (other, version, "", f"{life}-x", f"{life}-{'9' * 40}"):
            async with stream(address, f"?since={cursor}") as (reader, _):
                assert (await next_change(reader))["whole"]


async def test_whoever_watches_over_it_is_told_how_it_does_in_a_word() -> None:
    async with dashboard() as (_, address, _leaving):
        status, _, word = await get(address + "healthz")
        assert (status, word) == (200, b"healthy\n")


async def test_no_more_than_so_many_browsers_and_none_holds_up_the_end() -> None:
    async with dashboard() as (_, address, leaving), AsyncExitStack() as opened:
        for _ in range(MOST_READERS - 1):
            _, head = await opened.enter_async_context(stream(address))
            assert head == b"HTTP/1.1 200 OK"
        async with stream(address) as (_, head):
            assert b"200" in head
            async with stream(address) as (_, refused):
                assert b"503" in refused

        async def is_let_in() -> bool:
            async with stream(address) as (_, head):
                return b"200" in head

        async with asyncio.timeout(15):  # once the server has noticed who went
            while not await is_let_in():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        leaving.set()  # leaving the block fails if it takes longer than five seconds
        await asyncio.sleep(2.0)


# --- where it listens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("8080", ("127.0.0.1", 8080)),
        (":8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:8080", ("::1", 8080)),
        ("box.local:0", ("box.local", 0)),
    ],
)
def test_places_are_read_as_people_write_them(text: str, place: tuple[str, int]) -> None:
    assert parse_listen(text) == place


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1", "127.0.0.1:70000", "1:2:3", "http://x:1", "a b:1"])
def test_what_is_no_place_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_listen(text)


def test_only_loopback_is_for_this_machine_alone() -> None:
    assert [is_for_this_machine_alone(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "192.168.1.2")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_port_that_is_taken_is_told_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match="another --listen"):
            listen_at("127.0.0.1", port, "--listen")


def test_a_nodes_own_dashboard_is_of_the_whole_run_and_ends_with_the_node(tmp_path: Path) -> None:
    """And so is what `noloco watch` writes meanwhile."""
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    node = NodeDaemon(
        tmp_path / "n", "--join", seed.join_address(), "--stage", "0", "--dashboard", "0.0.0.0:0"
    )
    address = node.wait_for(r"Dashboard of run 'tiny': (http://127\.0\.0\.1:\d+/)", 180.0)[1]
    node.wait_for("Anybody who reaches this machine at that port can read it")

    def state() -> dict[str, list[list[str]]]:
        with urllib.request.urlopen(address + "state", timeout=10) as answer:
            found: dict[str, list[list[str]]] = json.load(answer)
            return found

    assert wait_until(lambda: any("stage 1: nobody" in text for _, text, _ in state()["remarks"]), 60.0)
    curves = tmp_path / "curves.jsonl"
    tool = [
        sys.executable,
        "-m",
        "bootstrap.tools_cli",
        "watch",
        "--join",
        seed.join_address(),
        "--seconds",
        "1",
    ]
    watch = Daemon(
        [*tool, "--events", str(curves), "--tensorboard", str(tmp_path / "tb")], tmp_path / "watch.log"
    )
    assert wait_until(lambda: curves.exists() and curves.read_text().count("\n") > 2, 90.0), watch.output
    assert json.loads(curves.read_text().splitlines()[0])["members"] == 1
    assert watch.leave() == 0
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))
    node.leave()
    port = int(address.rstrip("/").rpartition(":")[2])
    assert wait_until(lambda: _refuses(port), 10.0)


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--replay events.jsonl"),
        (["--join", "x", "--replay", "y"], "--replay events.jsonl"),
        (["--listen", "here", "--join", "x"], "write it as 127.0.0.1:8080"),
        (["--listen", "127.0.0.1:0", "--replay", "/nothing"], "There is no /nothing"),
        (["--listen", "127.0.0.1:0", "--join", "x"], "x"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    daemon = Daemon([sys.executable, "-m", "bootstrap.tools_cli", "dashboard", *arguments], tmp_path / "log")
    assert daemon.process.wait(60) != 0
    assert "error: " in daemon.output
    assert said in daemon.output
    assert "Traceback" not in daemon.output
