"""Wall clocks that are ahead, are set right, or jump: nobody is lost for longer than a record lives."""

from __future__ import annotations

import asyncio

import pytest

from node.process.daemon import Node
from tests.swarm.micro import FOREVER, MICRO, events_of, everyone_goes_on, peer_of, run_swarm, training, until

LIFETIME = MICRO["limits__record_lifetime"]


def sees(watcher: Node, other: Node) -> bool:
    members = watcher.view.members(other.context.stage, watcher.transport.now())
    return peer_of(other) in [member.peer for member in members]


@pytest.mark.long
def test_a_node_whose_clock_was_two_hours_ahead_is_seen_again_within_a_record_s_lifetime() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        wrong, watcher = swarm.nodes[0], swarm.nodes[2]
        swarm.network.skew(peer_of(wrong), 7200.0)
        await until(lambda: not sees(watcher, wrong), 3 * LIFETIME)
        swarm.network.skew(peer_of(wrong), 0.0)
        await until(lambda: sees(watcher, wrong), LIFETIME)
        assert [round(event["seconds"]) for event in events_of(swarm, "clock-jumped", node=0)] == [
            7200,
            -7200,
        ]
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_clock_that_jumps_for_a_moment_makes_nobody_gone() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        jumps = swarm.nodes[0]
        swarm.network.skew(peer_of(jumps), 3600.0)
        await asyncio.sleep(LIFETIME / 3)
        assert sees(jumps, swarm.nodes[1])
        swarm.network.skew(peer_of(jumps), 0.0)
        await asyncio.sleep(2 * LIFETIME)
        assert not events_of(swarm, "peer-gone", node=0)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())
