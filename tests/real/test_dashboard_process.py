"""The process beside a peer that shows the page: started once it can join, and again, and ended."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from node.machine.listening import listen_at
from node.process.dashboard_process import dashboard_beside
from protocol.errors import ResourceError
from tests.swarm.micro import until

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/me"


def stand_in(directory: Path, does: str) -> Path:
    """A program in the place of Python: it notes its process and arguments in `lives`, then does something."""
    program = directory / "program"
    program.write_text(f'#!/bin/sh\necho "$$ $@" >> {directory}/lives\n{does}\n', encoding="utf-8")
    program.chmod(0o755)
    return program


async def lives(directory: Path, count: int) -> list[str]:
    """Its first `count` lives, a line each."""
    file = directory / "lives"
    file.touch()
    await until(lambda: len(file.read_text().splitlines()) >= count, seconds=20)
    return file.read_text().splitlines()


async def test_it_waits_for_the_peer_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path, "exec sleep 60")))
    addresses: list[str] = []
    async with dashboard_beside("127.0.0.1:0", lambda: addresses, node=tmp_path):
        await asyncio.sleep(0.3)
        assert not (tmp_path / "lives").exists()
        addresses.append(ADDRESS)
        (line,) = await lives(tmp_path, 1)
        assert line.endswith(f"dashboard --listen=127.0.0.1:0 --beside={tmp_path} --join={ADDRESS}")
        process = int(line.split()[0])
        os.kill(process, 0)
    ends = time.monotonic() + 10
    while _runs(process):
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


async def test_the_page_of_a_private_run_gets_a_token_that_no_other_user_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "executable", str(stand_in(tmp_path, f'echo "$NOLOCO_TOKEN" >> {tmp_path}/tokens'))
    )
    monkeypatch.setenv("NOLOCO_TOKEN", "one of the shell's")
    given = iter(["noloco-first", "noloco-second", ""])
    async with dashboard_beside("127.0.0.1:0", lambda: [ADDRESS], token=lambda: next(given, "")):
        started = await lives(tmp_path, 2)
    assert not any("noloco-" in line.partition("--listen")[2] for line in started)
    assert (tmp_path / "tokens").read_text().splitlines()[:2] == ["noloco-first", "noloco-second"]


async def test_one_that_ends_is_started_again_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path, "exit 1")))
    told: list[str] = []
    async with dashboard_beside(
        "127.0.0.1:0", lambda: [ADDRESS], lambda sentence, event, **fields: told.append(sentence)
    ):
        await lives(tmp_path, 2)
    assert "The dashboard failed (its process ended" in told[0]
    assert "Nobody can look at it. It is started again" in told[0]


async def test_without_a_place_there_is_none_and_a_taken_one_is_told() -> None:
    async with dashboard_beside("", lambda: [ADDRESS]):
        pass
    with listen_at("127.0.0.1", 0, "") as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError, match="another --dashboard"):
            async with dashboard_beside(place, lambda: [ADDRESS]):
                pass
