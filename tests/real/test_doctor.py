"""`noloco doctor --self`: a part of a running node that fails is shown, and counts as something wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bootstrap.inspect.inspect_cli import examine
from node.watch.health import health_served, parts_told
from protocol.errors import Refused
from protocol.supervision import Supervisor


async def examined(directory: Path, supervisor: Supervisor, **report: object) -> bool:
    def told() -> dict[str, object]:
        parts = parts_told(supervisor, asyncio.get_running_loop().time())
        return {"healthy": True, "peer": "12D3KooWexample", "state": "serving", "parts": parts} | report

    async with health_served(directory, told):
        return await asyncio.to_thread(examine, directory)


async def test_a_part_that_fails_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def works() -> None:
        await asyncio.sleep(60)

    async def fails() -> None:
        raise Refused("no", "not today")

    supervisor = Supervisor()
    supervisor.keep("measuring links", works, "Nobody learns how fast they are.")
    assert await examined(tmp_path, supervisor)
    assert "measuring links running" in " ".join(capsys.readouterr().out.split())
    supervisor.group().keep("saving checkpoints", fails, "A restart goes on from an older state.")
    await asyncio.sleep(0.01)
    assert not await examined(tmp_path, supervisor)
    shown = " ".join(capsys.readouterr().out.split())
    assert "saving checkpoints failed 0 s 0 no: not today" in shown
    assert "Not well: saving checkpoints failed (no: not today)" in shown
    await supervisor.close()


async def test_a_node_without_its_network_is_not_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not await examined(tmp_path, Supervisor(), healthy=False, reason="p2pd is not running at present")
    assert "Not well: p2pd is not running at present." in capsys.readouterr().out


def test_without_a_node_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not examine(tmp_path)
    assert "no daemon runs with the state directory" in " ".join(capsys.readouterr().out.split())
