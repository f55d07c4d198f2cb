"""Forward passes of the next step before this one is applied: faster over long links, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from micro import (
    FOREVER,
    all_reached,
    events_of,
    mean_losses,
    micro_swarm,
    run_swarm,
    stage_nodes,
    step_of,
    trained,
    until,
)

from node.replica import Replica
from protocol.manifest import Manifest
from protocol.transport.memory_link import Link

FAR = Link(latency=0.15)


class Counting(Replica):
    """Counts the gradients that each of its steps takes."""

    def __init__(self, manifest: Manifest, stage: int, device: str) -> None:
        super().__init__(manifest, stage, device)
        self.gathered = 0
        self.taken: Counter[int] = Counter()

    def backward(self, *arguments):  # type: ignore[no-untyped-def]
        self.gathered += 1
        return super().backward(*arguments)

    def inner_step(self, microbatches: int):  # type: ignore[no-untyped-def]
        self.taken[self.gathered] += 1
        self.gathered = 0
        return super().inner_step(microbatches)


def test_each_step_still_takes_exactly_its_batch() -> None:
    async def main() -> None:
        swarm = micro_swarm(
            stages=3,
            model__layers=3,
            inner__microbatches=4,
            inner__staleness=1,
            inner__total_steps=12,
            link=FAR,
        )
        await swarm.seed_peer.start()
        nodes = [swarm.add(number, stage=number % 3, replica=Counting) for number in range(6)]
        await swarm.finish()
        for node in nodes:
            if node.context.stage < 2:
                assert set(node.replica.taken) == {4}

    run_swarm(main())


async def _seconds(staleness: int) -> float:
    """Virtual seconds of ten inner steps, with a second of them spent on the way of each microbatch."""
    swarm = micro_swarm(
        inner__staleness=staleness,
        inner__microbatches=4,
        inner__total_steps=FOREVER,
        link=FAR,
    )
    await swarm.start(1)
    loop = asyncio.get_running_loop()
    await until(lambda: len(swarm.nodes) == 2 and all_reached(swarm.nodes.values(), 5))
    began, first = loop.time(), step_of(stage_nodes(swarm, 0)[0])
    await until(lambda: all_reached(stage_nodes(swarm, 0), first + 10))
    seconds = loop.time() - began
    await swarm.leave()
    return seconds


def test_the_way_to_the_next_stage_is_hidden_behind_the_next_steps_forward_passes() -> None:
    without, with_ = run_swarm(_seconds(0)), run_swarm(_seconds(1))
    assert with_ < 0.75 * without


@pytest.mark.parametrize("stages", [2, 3])
def test_a_swarm_of_three_replicas_learns_and_comes_to_its_end(stages: int) -> None:
    async def main() -> None:
        swarm = await trained(
            3, stages=stages, model__layers=stages, inner__staleness=1, inner__total_steps=60, link=FAR
        )
        before, after = mean_losses(swarm, 10, 10)
        assert after < before - 0.3
        assert not events_of(swarm, "resend")

    run_swarm(main())


def test_a_replica_in_the_middle_can_leave_or_die_while_microbatches_are_ahead() -> None:
    async def main() -> None:
        swarm = micro_swarm(
            stages=3, model__layers=3, inner__staleness=1, inner__microbatches=4, inner__total_steps=FOREVER
        )
        await swarm.start(3)
        await until(lambda: len(swarm.nodes) == 9 and all_reached(swarm.nodes.values(), 6))
        middle = [number for number, node in swarm.nodes.items() if node.context.stage == 1]
        swarm.nodes[middle[0]].stop()
        await until(lambda: swarm.tasks[middle[0]].done())
        swarm.nodes.pop(middle[0])
        swarm.kill(middle[1])
        steps = max(step_of(node) for node in swarm.nodes.values())
        await until(lambda: all_reached(stage_nodes(swarm, 0), steps + 10))
        await swarm.leave()

    run_swarm(main())
