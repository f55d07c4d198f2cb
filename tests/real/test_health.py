"""The health check: the daemon itself answers, in time, or it is not well."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.watch.health import SOCKET_FILE, Report, Unwell, ask, directories, health_served

WELL: Report = {"healthy": True, "state": "serving", "step": 7}


async def asked(directory: Path, report: Callable[[], Report], deadline: float = 5.0) -> Report:
    async with health_served(directory, report):
        try:
            return await asyncio.to_thread(ask, directory, deadline)
        finally:
            await asyncio.sleep(0.05)  # the other end closes, too


async def test_a_daemon_that_is_well_tells_what_it_does(tmp_path: Path) -> None:
    assert await asked(tmp_path, lambda: WELL) == WELL
    with pytest.raises(Unwell, match="no daemon runs"):  # it has left
        ask(tmp_path)
    assert not (tmp_path / SOCKET_FILE).exists()


def test_what_a_killed_daemon_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = Path(tempfile.mkdtemp(prefix="noloco-health-", dir="/tmp"))
    (tmp_path / SOCKET_FILE).write_text(str(left / "socket"))
    assert asyncio.run(asked(tmp_path, lambda: WELL)) == WELL
    assert not left.exists()


async def test_a_socket_file_makes_nobody_remove_anything_else(tmp_path: Path) -> None:
    mine = tmp_path / "noloco-health-mine"
    mine.mkdir()
    (tmp_path / SOCKET_FILE).write_text(str(mine / "socket"))
    assert await asked(tmp_path, lambda: WELL) == WELL
    assert mine.exists()


async def test_a_state_directory_may_have_a_longer_path_than_a_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 20) / ("longer" * 20)
    directory.mkdir(parents=True)
    assert await asked(directory, lambda: WELL) == WELL


async def test_what_the_daemon_says_is_wrong_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(Unwell, match="p2pd is not running"):
        await asked(tmp_path, lambda: {"healthy": False, "reason": "p2pd is not running"})


async def test_a_daemon_that_hangs_does_not_pass(tmp_path: Path) -> None:
    def hang() -> Report:
        time.sleep(1.0)  # in the event loop, as a bug would
        return WELL

    with pytest.raises(Unwell, match="does not answer"):
        await asked(tmp_path, hang, deadline=0.2)


def test_a_daemon_that_was_killed_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / SOCKET_FILE).write_text(str(tmp_path / "gone"), encoding="utf-8")
    with pytest.raises(Unwell, match="does not answer"):
        ask(tmp_path)


@pytest.mark.parametrize("answer", [b"", b"nonsense\n", b"[1]\n", b"x" * 100_000])
def test_an_answer_that_is_none_does_not_pass(tmp_path: Path, answer: bytes) -> None:
    path = Path(tempfile.mkdtemp(dir="/tmp")) / "socket"  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        (tmp_path / SOCKET_FILE).write_text(str(path), encoding="utf-8")

        async def check() -> None:
            checking = asyncio.create_task(asyncio.to_thread(ask, tmp_path, 2.0))
            connection, _ = await asyncio.to_thread(server.accept)
            with connection:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                with pytest.raises(Unwell, match="does not answer"):
                    await checking

        try:
            asyncio.run(check())
        finally:
            path.unlink()
            path.parent.rmdir()


def test_nodes_of_several_devices_are_all_asked(tmp_path: Path) -> None:
    for name in ("device-0", "device-1", "documents"):
        (tmp_path / name).mkdir()
    assert directories(tmp_path) == [tmp_path]
    for name in ("device-0", "device-1"):
        (tmp_path / name / SOCKET_FILE).touch()
    assert directories(tmp_path) == [tmp_path / "device-0", tmp_path / "device-1"]
    (tmp_path / SOCKET_FILE).touch()
    assert directories(tmp_path) == [tmp_path]
