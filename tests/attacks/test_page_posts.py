"""POSTs to the page: who may ask for a text, who may order the node beside the page, and what nobody may."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bootstrap.dashboard.asking import MOST_BYTES, MOST_LETTERS, NodeOrders, Prompts, user_at
from bootstrap.dashboard.board import Sample
from node.watch.health import health_served
from tests.patience import patience
from tests.real.test_dashboard import dashboard, get
from tests.real.test_dashboard_strangers import connection, port_of


@dataclass
class Beside:
    """A page beside a node. Mutable: the prompts that came through, and the orders that the node got."""

    port: int = 0
    secret: str = ""
    prompts: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)

    async def post(self, path: str, body: bytes, *more: str, length: int | None = None) -> tuple[int, str]:
        """Status and sentence. Headers of `more` replace those of the page itself that have the same name."""
        here = f"127.0.0.1:{self.port}"
        own = [f"Host: {here}", f"Origin: http://{here}", f"X-Noloco-Secret: {self.secret}"]
        named = {line.partition(":")[0] for line in more}
        lines = [line for line in own if line.partition(":")[0] not in named]
        lines += [line for line in more if line.partition(":")[2]]
        size = f"Content-Length: {len(body) if length is None else length}"
        head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, size, "Connection: close", "", ""])
        async with connection(self.port, head.encode() + body) as (reader, _), asyncio.timeout(patience(30)):
            status = int((await reader.readline()).split()[1])
            await reader.readuntil(b"\r\n\r\n")
            return status, (await reader.read(4_096)).decode()


@asynccontextmanager
async def page_beside(directory: Path, user: int | None = None) -> AsyncIterator[Beside]:
    """A page whose node runs as this process's user, or as another `user`."""
    beside = Beside()

    async def write(prompt: str) -> Sample:
        beside.prompts.append(prompt)
        return Sample(0.0, 0, 0, None, f"{prompt} and more")

    obey = {name: lambda _, name=name: beside.orders.append(name) for name in ("pause", "resume", "finish")}
    orders = NodeOrders(directory, os.getuid() if user is None else user)
    async with (
        health_served(directory, lambda: {"healthy": True, "last": ""}, obey),
        dashboard(prompts=Prompts(write, lambda sample: None), orders=orders) as (_, address, _leaving),
    ):
        beside.port = port_of(address)
        found = re.search(rb'name="noloco-secret" content="([\w-]{40,})"', (await get(address))[2])
        assert found is not None
        beside.secret = found[1].decode()
        yield beside


FOREIGN = {
    "a stranger's page": ["Origin: https://evil.example"],
    "a page on another port of this machine": ["Origin: http://127.0.0.1:1"],
    "a sandboxed page": ["Origin: null"],
    "no page": ["Origin:"],
    "two origins": ["Origin: http://127.0.0.1:{port}", "Origin: https://evil.example"],
    "no secret": ["X-Noloco-Secret:"],
    "a guess": ["X-Noloco-Secret: AAAA"],
    "a secret that is no ASCII": ["X-Noloco-Secret: \xfc"],
    "a rebound name": ["Host: evil.example", "Origin: http://evil.example"],
}


async def test_no_foreign_page_writes_or_orders(tmp_path: Path) -> None:
    async with page_beside(tmp_path) as page:
        for who, headers in FOREIGN.items():
            lines = [line.format(port=page.port) for line in headers]
            for path, body in (("/write", b"The "), ("/order", b"finish")):
                status, said = await page.post(path, body, *lines)
                assert status in (403, 421), (who, said)
        for path in ("write", "order"):
            assert (await get(f"http://127.0.0.1:{page.port}/{path}"))[0] == 405
        assert (page.prompts, page.orders) == ([], [])


async def test_the_page_itself_writes_and_orders_and_no_more_often_than_it_may(tmp_path: Path) -> None:
    async with page_beside(tmp_path) as page:
        assert (await page.post("/write", "Größe <b>".encode()))[0] == 200
        status, said = await page.post("/write", b"again")
        assert (status, "try again in" in said) == (429, True)
        for order in ("pause", "resume", "finish"):
            status, said = await page.post("/order", order.encode(), "X-Forwarded-For: 203.0.113.9")
            assert (status, said[:3]) == (200, "It ")
        assert (page.prompts, page.orders) == (["Größe <b>"], ["pause", "resume", "finish"])


async def test_bodies_are_bounded_in_length_and_time_and_are_text(tmp_path: Path) -> None:
    async with page_beside(tmp_path) as page:
        wanted = [
            (400, b"", None), (400, b"   ", None), (400, b"x" * (MOST_LETTERS + 1), None), (400, b"\xff\xfe", None),
            (413, b"x" * (MOST_BYTES + 1), None), (413, b"x" * (MOST_BYTES + 1), 10**9), (408, b"The ", 100),
        ]  # fmt: skip
        for status, body, length in wanted:
            assert (await page.post("/write", body, length=length))[0] == status, body[:4]
        for order in ("", "limits", "status", "PAUSE", '{"order": "finish"}'):
            assert (await page.post("/order", order.encode()))[0] == 400
        assert (page.prompts, page.orders) == ([], [])


async def test_another_user_of_the_machine_orders_nothing(tmp_path: Path) -> None:
    async with page_beside(tmp_path, user=os.getuid() + 1) as page:
        status, said = await page.post("/order", b"finish", "X-Forwarded-For: 127.0.0.1")
        assert status == 403
        assert "noloco node" in said
        assert page.orders == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_user_at_an_end_of_a_connection_is_known_and_of_no_connection_is_not(host: str) -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(wait, host, 0) as server:
        place = server.sockets[0].getsockname()[:2]
        _, writer = await asyncio.open_connection(*place)
        end = writer.get_extra_info("sockname")[:2]
        assert user_at(end, place) == os.getuid()
        assert user_at((host, end[1] ^ 1), place) is None
        writer.close()


async def test_a_page_of_a_run_elsewhere_has_neither(tmp_path: Path) -> None:
    async with dashboard() as (_, address, _leaving):
        page = Beside(port_of(address), "x")
        for path in ("/write", "/order", "/state"):
            assert (await page.post(path, b"The "))[0] in (404, 405)
