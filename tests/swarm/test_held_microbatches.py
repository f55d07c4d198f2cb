"""Peers that hold microbatches and say that they get on: senders go by their own clock and ask others meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.process.daemon import Node
from protocol.messages import Progress
from protocol.messages.training import Backlog, Forward, GetBacklog, Gradient
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import (
    FOREVER,
    WIDE,
    events_of,
    everyone_reaches,
    micro_corpus,
    micro_manifest,
    peer_of,
    run_swarm,
    stage_nodes,
    step_of,
    until,
)

REPLICAS = 4
WORK = 0.5  # seconds of a microbatch at the last stage


def work_seconds(stage: int, priority: Priority) -> float:
    return 0.005 if priority in (Priority.OPTIMIZER, Priority.SERVE) else WORK


def hold(node: Node) -> list[str]:
    """From now on it keeps what it gets, says that it has nothing to do and gets on; returns what it was sent."""
    kept: list[str] = []

    async def forward(request: Request[Forward]) -> Answer[Gradient]:
        kept.append(request.message.microbatch)
        done = 0

        def look() -> Progress:
            nonlocal done
            done += 1
            return Progress(state="onward", done=done)

        request.status.look = look
        await asyncio.sleep(1e6)
        raise AssertionError

    async def backlog(request: Request[GetBacklog]) -> Answer[Backlog]:
        return Answer(Backlog(seconds=0.0))

    node.context.rpc.handle(Forward.answered_by(forward), GetBacklog.answered_by(backlog))
    return kept


async def seen(swarm: SimulatedSwarm, seconds: float) -> tuple[int, float]:
    """Steps of the first stage in so many seconds, and the longest time between two of one node."""
    nodes, clock = stage_nodes(swarm, 0), swarm.network.now
    before, steps = {node: step_of(node) for node in nodes}, 0
    last, longest, end = dict.fromkeys(nodes, clock()), 0.0, clock() + seconds
    while clock() < end:
        await asyncio.sleep(0.05)
        for node in nodes:
            longest = max(longest, clock() - last[node])
            if step_of(node) > before[node]:
                steps += step_of(node) - before[node]
                before[node], last[node] = step_of(node), clock()
    return steps, longest


async def of_workers(**speeds: float) -> SimulatedSwarm:
    """Two stages of four replicas; the last stage's first one is as fast as `first` says."""
    manifest = micro_manifest(inner__total_steps=FOREVER)
    swarm = SimulatedSwarm(manifest, micro_corpus(), 2, WIDE, seconds=work_seconds)
    await swarm.seed_peer.start()
    for number in range(2 * REPLICAS):
        swarm.add(number, stage=number % 2, speed=speeds.get("first", 1.0) if number == 1 else 1.0)
    await everyone_reaches(swarm, 1 if speeds else 3)
    return swarm


def test_one_that_holds_microbatches_costs_little_and_is_named_once() -> None:
    """Failed before: all nodes stood still for as long as progress grew, by the constants for 57 hours."""

    async def main() -> None:
        swarm = await of_workers()
        honest, usual = await seen(swarm, 120.0)
        holder = stage_nodes(swarm, 1)[0]
        kept = hold(holder)
        await asyncio.sleep(60.0)
        steps, longest = await seen(swarm, 240.0)
        print(f"{steps / 2 / honest:.2f} of all, {len(kept)} held; {longest:.1f} s, before {usual:.1f} s")
        assert steps / 2 >= 0.8 * honest * (REPLICAS - 1) / REPLICAS
        assert longest <= 3 * usual
        for number, node in swarm.nodes.items():
            named = [event["peer"] for event in events_of(swarm, "held", number)]
            assert named == ([peer_of(holder)] if node.context.stage == 0 else [])
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_one_that_holds_from_its_first_microbatch_on_does_not_keep_a_run_from_beginning() -> None:
    """Nobody has any experience then: who has never answered gets one microbatch at a time."""

    async def main() -> None:
        manifest = micro_manifest(inner__total_steps=FOREVER)
        swarm = SimulatedSwarm(manifest, micro_corpus(), 2, WIDE, seconds=work_seconds)
        await swarm.start(REPLICAS)
        await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()), 60, 0.01)
        hold(stage_nodes(swarm, 1)[0])
        await until(lambda: all(step_of(node) > 10 for node in stage_nodes(swarm, 0)), 120)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_one_that_is_twenty_times_slower_than_the_others_still_trains_and_holds_nobody_up() -> None:
    """What is sent to a second peer stays with the slow one, which ends it; cancelled, it would never do a step."""

    async def main() -> None:
        swarm = await of_workers(first=1 / 20)
        slow = stage_nodes(swarm, 1)[0]
        await asyncio.sleep(120.0)
        began = slow.context.counters.received
        steps, longest = await seen(swarm, 240.0)
        done, possible = slow.context.counters.received - began, 240.0 / (20 * WORK)
        print(
            f"{done} of {possible:.0f} microbatches of the slow one; {steps} steps, {longest:.1f} s at most"
        )
        assert done >= 0.3 * possible
        assert longest < 20 * WORK
        await swarm.leave()

    run_swarm(main())
