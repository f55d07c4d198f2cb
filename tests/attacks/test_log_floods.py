"""Fresh identities that break the protocol, one after the other: each is worth a line, all of them are not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from node.watch.events import set_up_logging
from protocol.access.peer_limits import BAN_AFTER_STRIKES
from protocol.records.identity import Identity
from protocol.rpc.rpc import Traffic
from tests.unit.two_peers import Two, in_virtual_time, two_peers

STRANGERS = 200


@pytest.fixture
def node_log(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    set_up_logging(verbose=False, file=tmp_path / "node.log")
    yield tmp_path / "node.log"
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.level = before


async def break_the_protocol(two: Two, number: int) -> None:
    mallory = MemoryTransport(two.network, Identity.from_seed("mallory", number))
    await mallory.start()
    for _ in range(BAN_AFTER_STRIKES):
        stream = await mallory.open(two.address, Traffic.CONTROL.protocol, 5.0)
        await stream.write(b"GET / HTTP/1.1" + bytes(64))
        await asyncio.sleep(0.1)
        stream.close()
    await mallory.close()


def test_a_flood_of_offenders_fills_no_log(node_log: Path) -> None:
    """Before: a line for each of them, without end."""

    @in_virtual_time
    async def main() -> None:
        async with two_peers() as two:
            for number in range(STRANGERS):
                await break_the_protocol(two, number)

    began = time.monotonic()
    main()
    minutes = 1 + (time.monotonic() - began) / 60
    lines = node_log.read_text().splitlines()
    assert any("broke the protocol" in line for line in lines)
    assert len(lines) <= 2 * 21 * minutes  # of two kinds, each with one that tells how many more there were
