"""Records whose fields lie, under the keys that everybody reads: nobody vanishes, begins anew or moves."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import msgpack
import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from protocol.records.announcement import MOST_LEVEL, Announcement, is_sampled, stage_key
from protocol.records.identity import Identity
from tests.swarm.micro import FOREVER, events_of, everyone_reaches, micro_swarm, run_swarm, step_of, until

FAR = 2**63 - 1
LIES: dict[str, list[dict[str, Any]]] = {
    "levels": [{"level": MOST_LEVEL}, {"level": 10}],
    "numbers": [
        {
            "state": "serving", "since": -1e308, "step": FAR, "round": FAR, "loss": 1e308, "tokens_per_second": 1e308,
            "capacity": 1e308, "may_serve": [0, 1, FAR], "beginning": FAR, "begun": 1e308,
        },
        {"state": "serving", "since": 1e308, "begun": 1e308, "loss": -1e308, "tokens_per_second": -1e308},
        {"state": "joining", "since": 0.0, "step": FAR},
    ],
}  # fmt: skip


async def lie(swarm: Any, lies: dict[str, Any], number: int) -> None:
    """Keep a record with these fields under each stage's key, of a peer that answers nothing."""
    run_id, level = swarm.seed_peer.signed.run_id, lies.get("level", 0)
    tried = (Identity.from_seed("liar", number, name) for name in count())
    identity = next(one for one in tried if level == MOST_LEVEL or is_sampled(one.peer_id, level))
    transport = MemoryTransport(swarm.network, identity)
    await transport.start()
    await transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    for stage in (0, 1):
        honest = Announcement(stage=stage, state="joining", since=transport.now() - 600.0).model_dump()
        await transport.put(stage_key(run_id, stage), msgpack.packb(honest | lies), 3_000.0, 5.0)


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_records_that_lie_hide_nobody_and_no_newcomer_begins_anew(lies: list[dict[str, Any]]) -> None:
    """Before, with one level: a stage's members lost each other, and a newcomer began it from the seed."""

    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        swarm.seconds = lambda stage, priority: 0.5
        await swarm.start(2)
        await everyone_reaches(swarm, 2)
        honest = {node.transport.peer_id for node in swarm.nodes.values()}
        for number, each in enumerate(lies):
            await lie(swarm, each, number)
        await asyncio.sleep(4 * swarm.manifest.limits.record_lifetime)
        for node in swarm.nodes.values():
            assert honest - {node.transport.peer_id} <= set(node.member.view.peers())
            assert all(size.level == 0 for size in node.member.view.sizes.values())
        before = min(map(step_of, swarm.nodes.values()))
        newcomer = swarm.add(9)
        await until(lambda: bool(events_of(swarm, "serving", 9)))
        await everyone_reaches(swarm, before + 2)
        assert honest <= set(newcomer.member.view.peers())
        assert events_of(swarm, "downloaded", 9)
        assert not events_of(swarm, "initialised", 9)
        assert not events_of(swarm, "begun-anew")
        assert not any(events_of(swarm, "moving", number) for number in range(4))
        await swarm.leave()

    run_swarm(main())
