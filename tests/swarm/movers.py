"""Swarms whose nodes chose their stages themselves and may move, and what tests of that share."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.model.stage import work_of
from tests.swarm.micro import (
    FOREVER,
    events_of,
    micro_manifest,
    micro_swarm,
    numbers_of_stage,
    stage_nodes,
    step_of,
    until,
)

LIFETIME = 30.0  # of records
MICROBATCH_SECONDS = 10.0  # so slow that an hour is a few thousand microbatches; the ratios are what counts
SLOW: dict[str, Any] = {
    "inner__microbatches": 4,
    "inner__total_steps": FOREVER,
    "model__intermediate_size": 1536,  # next to such layers the head is little: stages are alike
    "limits__record_lifetime": LIFETIME,
    "limits__microbatch_deadline": 120.0,
    "limits__gossip_deadline": 240.0,
}


def slow_swarm(stages: int, **changes: Any) -> SimulatedSwarm:
    """Each stage takes the time that its multiplications ask for, the last one in a single piece of work."""
    swarm: SimulatedSwarm = micro_swarm(stages=stages, model__layers=stages, **SLOW, **changes)
    shares = relative_work(stages)

    def seconds(stage: int, priority: Priority) -> float:
        is_last = stage == stages - 1
        forward = MICROBATCH_SECONDS * shares[stage] * (1 if is_last else 1 / 3)
        backward = MICROBATCH_SECONDS * shares[stage] * 2 / 3
        return {Priority.FORWARD: forward, Priority.BACKWARD: backward}.get(priority, 0.01)

    swarm.seconds = seconds
    return swarm


@cache
def relative_work(stages: int) -> list[float]:
    manifest = micro_manifest(stages=stages, model__layers=stages, **SLOW)
    work = [work_of(manifest, stage) for stage in range(manifest.stages)]
    return [amount / min(work) for amount in work]


async def settled(stages: int, replicas: int, lifetimes: int = 3, **changes: Any) -> SimulatedSwarm:
    """A swarm whose nodes chose their stages themselves and have trained for so many record lifetimes.

    After three they may move.
    """
    swarm = slow_swarm(stages, **changes)
    await swarm.seed_peer.start()
    for number in range(stages * replicas):
        swarm.add(number)
        await asyncio.sleep(4)  # so that each sees where those before it are
    await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()), step=1.0)
    assert [len(stage_nodes(swarm, stage)) for stage in range(stages)] == [replicas] * stages
    await asyncio.sleep(lifetimes * LIFETIME)
    assert not events_of(swarm, "moving")
    return swarm


def capacities(swarm: SimulatedSwarm) -> list[float]:
    """Replicas of each stage over what a microbatch costs there: its microbatches per `MICROBATCH_SECONDS`."""
    shares = relative_work(swarm.manifest.stages)
    serving = [node for node in swarm.nodes.values() if node.public_state == "serving"]
    return [sum(node.context.stage == s for node in serving) / share for s, share in enumerate(shares)]


def best_throughput(swarm: SimulatedSwarm) -> float:
    """Of all ways to spread as many equal peers over the stages."""
    shares = relative_work(swarm.manifest.stages)
    counts = [0] * len(shares)
    for _ in swarm.nodes:  # each to where it is needed most: the best for equal peers
        poorest = min(range(len(shares)), key=lambda stage: counts[stage] / shares[stage])
        counts[poorest] += 1
    return min(count / share for count, share in zip(counts, shares, strict=True))


async def microbatches_in(swarm: SimulatedSwarm, seconds: float) -> float:
    """How many the first stage has trained in so many seconds, while nobody moves."""
    first = stage_nodes(swarm, 0)
    before = sum(node.context.counters.received for node in first)
    await asyncio.sleep(seconds)
    return sum(node.context.counters.received for node in first) - before


def kill_half(swarm: SimulatedSwarm, stage: int) -> None:
    """Of three, two."""
    numbers = numbers_of_stage(swarm, stage)
    for number in numbers[: (len(numbers) + 1) // 2]:
        swarm.kill(number)


async def all_train_on(swarm: SimulatedSwarm) -> None:
    goals = {number: step_of(node) + 3 for number, node in swarm.nodes.items()}
    await until(
        lambda: all(step_of(swarm.nodes[n]) >= goal for n, goal in goals.items()), seconds=1200, step=1.0
    )


async def at_rest(swarm: SimulatedSwarm) -> None:
    """Until nobody has moved for eight record lifetimes: longer than one move comes after another."""
    while True:
        moves = len(events_of(swarm, "moving"))
        await asyncio.sleep(8 * LIFETIME)
        if len(events_of(swarm, "moving")) == moves:
            return


async def one_moves(swarm: SimulatedSwarm) -> dict[str, Any]:
    """Until the next move begins; returns its event."""
    before = len(events_of(swarm, "moving"))
    await until(lambda: len(events_of(swarm, "moving")) > before, seconds=3600, step=1.0)
    return events_of(swarm, "moving")[before]


async def somebody_moved(swarm: SimulatedSwarm) -> None:
    await until(lambda: bool(events_of(swarm, "moved")), seconds=3600, step=1.0)


async def never_empty(swarm: SimulatedSwarm) -> None:
    """Raises when a stage has no serving replica, at any moment."""
    while True:
        assert min(capacities(swarm)) > 0
        await asyncio.sleep(0.5)
