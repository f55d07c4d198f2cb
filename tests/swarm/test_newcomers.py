"""Newcomers take their places: evenly when many come at once, near the others where that is all that matters."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from protocol.ground import PeerId
from protocol.records.identity import Identity
from tests.swarm.micro import FOREVER, SEED, micro_swarm, run_swarm, stage_nodes, until
from tests.swarm.movers import slow_swarm

EVEN: dict[str, Any] = {
    "model__intermediate_size": 512,  # next to such layers the last stage's head is a sixth more work
    "inner__total_steps": FOREVER,
    "limits__record_lifetime": 60.0,
}


async def all_serve(swarm: SimulatedSwarm) -> None:
    await until(lambda: all(n.public_state == "serving" for n in swarm.nodes.values()), seconds=600, step=0.5)


async def end(swarm: SimulatedSwarm) -> None:
    """As fast as it can: how nodes leave is not what this is about."""
    for number in list(swarm.nodes):
        swarm.kill(number)
    await swarm.leave()


@pytest.mark.long_but("3.0-0.01-0.8-60.0")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("within", "making", "jitter", "record_lifetime"),
    [
        (0.1, 0.01, 0.005, 60.0),  # six terminals at once
        # a few seconds apart, with seconds of building the model between claim and record
        (10.0, 10.0, 0.005, 60.0),
        (10.0, 10.0, 0.005, 3.0),  # and records end before that
        (3.0, 0.01, 0.8, 60.0),  # messages overtake each other
    ],
)
def test_newcomers_of_the_same_moment_spread_evenly(
    within: float, making: float, jitter: float, record_lifetime: float
) -> None:
    swarm_options = EVEN | {"limits__record_lifetime": record_lifetime}

    async def main(seed: int) -> list[int]:
        swarm = micro_swarm(seed=seed, link=Link(latency=0.02, jitter=jitter), **swarm_options)
        swarm.seconds = lambda stage, priority: making if priority is Priority.SERVE else 1.0
        await swarm.seed_peer.start()
        rng, began = random.Random(seed), 0.0
        for number, moment in enumerate(sorted(rng.uniform(0, within) for _ in range(6))):
            await asyncio.sleep(moment - began)
            began = moment
            swarm.add(number)
        await all_serve(swarm)
        counts = [len(stage_nodes(swarm, stage)) for stage in range(2)]
        await end(swarm)
        return counts

    assert [run_swarm(main(seed)) for seed in range(5)] == [[3, 3]] * 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_newcomer_goes_to_its_neighbours_where_that_makes_the_way_of_microbatches_shorter() -> None:
    """Stage 1 is overseas from stages 0 and 2; a newcomer from here is worth most there, and measures that."""
    overseas = range(2, 4)

    async def main() -> None:
        there = {Identity.from_seed("node", SEED, number).peer_id for number in overseas}

        def link(sender: PeerId, receiver: PeerId) -> Link:
            return Link(latency=0.1 if (sender in there) != (receiver in there) else 0.002, bandwidth=1e6)

        swarm = slow_swarm(3, link=link)
        await swarm.seed_peer.start()
        for number, stage in enumerate([0, 0, 1, 1, 2, 2, 2]):
            swarm.add(number, stage=stage)
        await all_serve(swarm)
        await asyncio.sleep(300)
        newcomer = swarm.add(9)
        await all_serve(swarm)
        assert newcomer.context.stage == 1
        assert "visits-cut-short" not in {event["event"] for event in swarm.events}
        await end(swarm)

    run_swarm(main())
