"""A run ends stage after stage, whatever single peers say or miss of it."""

from __future__ import annotations

import asyncio

from tests.swarm.micro import micro_swarm, run_swarm, until

STEPS = 40
ALMOST_DEAD = 0.001  # of the others' speed


def test_whoever_only_says_that_it_trains_keeps_nobody_and_ends_with_the_others() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=STEPS)
        await swarm.seed_peer.start()
        swarm.add(0, stage=0, speed=ALMOST_DEAD)
        for number in (1, 2):
            swarm.add(number, stage=0)
        for number in (3, 4):
            swarm.add(number, stage=1)
        nodes = swarm.nodes
        await until(lambda: all(nodes[number].public_state == "finished" for number in (1, 2)))
        await until(lambda: nodes[0].public_state == "serving")  # from the others' state, once it has it
        assert nodes[3].public_state == nodes[4].public_state == "serving"  # more may come of node 0
        await asyncio.wait_for(swarm.finish(), 3000)
        assert nodes[0].replica.step < STEPS // 2
        assert nodes[3].replica.step > STEPS // 2

    run_swarm(main())


def test_a_slow_one_of_the_first_stage_is_waited_for() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=STEPS)
        await swarm.seed_peer.start()
        swarm.add(0, stage=0, speed=0.2)
        for number in (1, 2):
            swarm.add(number, stage=0)
        for number in (3, 4):
            swarm.add(number, stage=1)
        await asyncio.wait_for(swarm.finish(), 3000)
        assert all(swarm.nodes[number].replica.step >= STEPS for number in (0, 1, 2))

    run_swarm(main())
