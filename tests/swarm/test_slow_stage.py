"""A stage whose machines take far longer than any deadline trains slowly instead of never, and nothing is in vain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.lab.simulation.swarm import WORK_SECONDS, SimulatedSwarm
from node.model.compute import Priority
from node.process.daemon import Node
from tests.swarm.micro import (
    FOREVER,
    all_reached,
    assert_exact_admission,
    events_of,
    micro_swarm,
    numbers_of_stage,
    peer_of,
    run_swarm,
    stage_nodes,
    step_of,
    until,
)

SLOW_SECONDS = 90.0  # that a microbatch takes; deadlines are 10 s here, 30 s by default


def first_stage(swarm: SimulatedSwarm) -> list[Node]:
    """Its two nodes, also before they have joined."""
    return [swarm.nodes[number] for number in (0, swarm.manifest.stages)]


def seconds_of_work(swarm: SimulatedSwarm, stage: int) -> dict[int, float]:
    """How long each node of a stage has computed so far."""
    return {n: swarm.nodes[n].context.compute.busy.seconds() for n in numbers_of_stage(swarm, stage)}


def slow_swarm(slow: int, seconds: float = SLOW_SECONDS, **settings: Any) -> SimulatedSwarm:
    """With a stage that takes so long for a microbatch, forward and backward together."""
    swarm: SimulatedSwarm = micro_swarm(inner__total_steps=FOREVER, limits__record_lifetime=60.0, **settings)
    last = swarm.manifest.stages - 1

    def takes(stage: int, priority: Priority) -> float:
        if stage != slow or priority not in (Priority.FORWARD, Priority.BACKWARD):
            return WORK_SECONDS[priority]
        return seconds if stage == last else seconds / 2

    swarm.seconds = takes
    return swarm


@pytest.mark.long_but("2-1")
@pytest.mark.parametrize(("stages", "slow"), [(2, 1), (3, 2), (3, 1)])
def test_a_stage_that_takes_90_seconds_a_microbatch_trains_and_computes_nothing_in_vain(
    stages: int, slow: int
) -> None:
    """Failed before: each sender gave up after its deadline and asked the other peer, whose queue was as long."""

    async def main() -> None:
        swarm = slow_swarm(slow, stages=stages, model__layers=stages)
        await swarm.start(2)
        await until(lambda: all_reached(first_stage(swarm), 5), 3_000, 10.0)
        assert not events_of(swarm, "resend")
        for stage in range(stages - 1):
            sent = sum(sum(node.context.counters.sent.values()) for node in stage_nodes(swarm, stage))
            computed = sum(node.context.counters.received for node in stage_nodes(swarm, stage + 1))
            under_way = len(stage_nodes(swarm, stage + 1)) * 2
            assert 0 <= computed - sent <= under_way
        assert_exact_admission(swarm)
        told = events_of(swarm, "stage-too-slow")
        assert {event["stage"] for event in told} == {slow}
        assert len(told) <= len(stage_nodes(swarm, slow))  # each node once at most
        assert all(event["seconds_here"] > 60 > 1 > event["seconds_before"] for event in told)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_slow_peer_that_dies_at_work_is_found_and_what_its_senders_gave_up_is_not_computed() -> None:
    async def main() -> None:
        swarm = slow_swarm(1)
        await swarm.start(2)
        await until(lambda: all_reached(first_stage(swarm), 1), 1_000, 1.0)
        before = seconds_of_work(swarm, 1)
        await asyncio.sleep(10)
        frozen = next(n for n, seconds in seconds_of_work(swarm, 1).items() if seconds > before[n])
        swarm.network.freeze(peer_of(swarm.nodes[frozen]))
        began = asyncio.get_running_loop().time()
        await until(lambda: bool(events_of(swarm, "resend")), 100)
        assert asyncio.get_running_loop().time() - began < 11  # the manifest's deadline, in silence
        goal = max(map(step_of, first_stage(swarm))) + 2
        await until(lambda: all_reached(first_stage(swarm), goal), 3_000, 1.0)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
