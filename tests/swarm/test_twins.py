"""A state directory that was copied: two nodes with one key. Both are told, and the younger one leaves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from protocol.errors import NodeFailed
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from protocol.records.records import key_digest, seal_record
from tests.swarm.micro import FOREVER, MICRO, everyone_goes_on, peer_of, run_swarm, training, until

LIFETIME = MICRO["limits__record_lifetime"]


async def live_beside(swarm: Any, number: int, since: float, seconds: float) -> None:
    """What the DHT sees of a copy of node `number` that came at `since`: its records, a second apart."""
    identity, peer = Identity.from_seed("node", swarm.seed, number), peer_of(swarm.nodes[number])
    key = stage_key(swarm.seed_peer.signed.run_id, 0)
    value = Announcement(stage=0, state="serving", since=since, step=1).to_bytes()
    island = await swarm.network.search(peer)
    for _ in range(round(seconds)):
        expires = swarm.network.now() + LIFETIME
        sealed = seal_record(identity, key, value, expires)
        island.put(key_digest(key), peer, sealed, expires, swarm.network.now())
        await asyncio.sleep(1.0)


def test_the_younger_of_two_with_one_key_leaves_with_a_sentence() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        node, task = swarm.nodes[0], swarm.tasks[0]
        assert node.context.stage == 0
        await live_beside(swarm, 0, since=swarm.network.now() - 3_600.0, seconds=2 * LIFETIME)
        await until(task.done)
        error = task.exception()
        assert isinstance(error, NodeFailed)
        assert "its state directory was copied" in str(error)
        assert "--state-dir" in str(error)
        swarm.tasks.pop(0)
        swarm.nodes.pop(0)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_the_older_one_stays_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        await live_beside(swarm, 0, since=swarm.network.now() + 1.0, seconds=3 * LIFETIME)
        assert not swarm.tasks[0].done()
        await everyone_goes_on(swarm)
        await swarm.leave()

    with caplog.at_level(logging.WARNING):
        run_swarm(main())
    assert caplog.text.count("A second node runs with this node's key") == 1


def test_what_an_earlier_life_left_is_no_twin() -> None:
    """Its record stands until it runs out, and nobody renews it."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        await live_beside(swarm, 0, since=swarm.network.now() - 3_600.0, seconds=1)
        await asyncio.sleep(3 * LIFETIME)
        assert not swarm.tasks[0].done()
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())
