"""Two real peers behind home routers of network namespaces meet directly; root, iproute2 and nftables are needed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.patience import patience

PUNCHING = Path(__file__).parents[2] / "benchmarks" / "nat" / "punching.py"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("nft") or not shutil.which("ip"),
    reason="network namespaces with routers need root, iproute2 and nftables",
)


async def outcomes(pair: str) -> list[dict[str, object]]:
    command = (sys.executable, str(PUNCHING), "--pairs", pair, "--tries", "1", "--prefix", f"nt{os.getpid()}")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(patience(120.0)):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    rows: dict[str, list[dict[str, object]]] = json.loads(told.splitlines()[-1])
    return rows[pair]


async def test_two_homes_that_keep_ports_meet_directly() -> None:
    (found,) = await outcomes("cone+cone")
    assert found["direct"], found


async def test_routers_that_give_each_destination_another_port_leave_it_to_the_peer_between() -> None:
    (found,) = await outcomes("random+random")
    assert not found["direct"], found
    assert int(str(found["answers"])) > 10
