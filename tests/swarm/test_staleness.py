"""Forward passes of the next step before this one is applied: faster over long links, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory_link import Link
from node.model.passes import Passes
from node.model.replica import Replica
from protocol.run.manifest import Manifest
from tests.swarm.micro import (
    FOREVER,
    all_reached,
    assert_exact_admission,
    events_of,
    mean_losses,
    micro_swarm,
    numbers_of_stage,
    run_swarm,
    stage_nodes,
    step_of,
    trained,
    training,
    until,
)

FAR = Link(latency=0.15)


class CountedPasses(Passes):
    backwards = 0  # since the last inner step

    def backward(self, *arguments):  # type: ignore[no-untyped-def]
        self.backwards += 1
        return super().backward(*arguments)


class Counting(Replica):
    """Counts the gradients that each of its steps takes."""

    def __init__(self, manifest: Manifest, stage: int, device: str) -> None:
        super().__init__(manifest, stage, device)
        self.passes: CountedPasses = CountedPasses(self.stage, self.device, self.slow_weights())
        self.taken: Counter[int] = Counter()

    def inner_step(self, microbatches: int):  # type: ignore[no-untyped-def]
        self.taken[self.passes.backwards] += 1
        self.passes.backwards = 0
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
    settings = {"inner__microbatches": 4, "inner__total_steps": FOREVER, "link": FAR}
    swarm = await training(1, step=5, inner__staleness=staleness, **settings)
    loop = asyncio.get_running_loop()
    began, first = loop.time(), step_of(stage_nodes(swarm, 0)[0])
    await until(lambda: all_reached(stage_nodes(swarm, 0), first + 10))
    seconds = loop.time() - began
    await swarm.leave()
    return seconds


@pytest.mark.long
def test_the_way_to_the_next_stage_is_hidden_behind_the_next_steps_forward_passes() -> None:
    without, with_ = run_swarm(_seconds(0)), run_swarm(_seconds(1))
    assert with_ < 0.75 * without


@pytest.mark.long_but("2")
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


@pytest.mark.long
def test_a_replica_in_the_middle_can_leave_or_die_while_microbatches_are_ahead() -> None:
    async def main() -> None:
        settings = {"model__layers": 3, "inner__microbatches": 4, "inner__total_steps": FOREVER}
        swarm = await training(3, step=6, stages=3, inner__staleness=1, **settings)
        leaving, dying, _ = numbers_of_stage(swarm, 1)
        swarm.nodes[leaving].stop()
        await until(lambda: swarm.tasks[leaving].done())
        swarm.nodes.pop(leaving)
        swarm.kill(dying)
        steps = max(step_of(node) for node in swarm.nodes.values())
        await until(lambda: all_reached(stage_nodes(swarm, 0), steps + 10))
        assert_exact_admission(swarm, stage_nodes(swarm, 1))
        assert len(stage_nodes(swarm, 1)) == 1
        await swarm.leave()

    run_swarm(main())


def tasks_of(*owners: object) -> list[asyncio.Task[Any]]:
    """Those that run a method of one of them."""
    frames = {task: getattr(task.get_coro(), "cr_frame", None) for task in asyncio.all_tasks()}
    return [
        task
        for task, frame in frames.items()
        if frame is not None and any(frame.f_locals.get("self") is owner for owner in owners)
    ]


def test_training_that_is_ended_in_the_middle_of_a_step_leaves_no_microbatch_behind() -> None:
    """Failed before: those drawn ahead went on without it."""

    async def main() -> None:
        swarm = await training(2, step=3, inner__staleness=1, inner__total_steps=FOREVER, link=FAR)
        service: Any = swarm.nodes[0].service
        owners = service._pipeline, service.trainer, service.trainer._source
        in_step = asyncio.Event()

        async def never(*_: Any) -> None:
            in_step.set()
            await asyncio.sleep(1e6)

        service.trainer._healing.step_done = never
        await in_step.wait()
        ahead = tasks_of(*owners)
        for task in ahead:
            if "Trainer.run" in repr(task.get_coro()):
                task.cancel()
                await asyncio.wait([task])
        assert len(ahead) > 1
        assert not tasks_of(*owners)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
