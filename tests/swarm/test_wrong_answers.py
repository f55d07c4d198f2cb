"""Replicas that answer something else than they should are found by comparison and left alone, and nobody else is."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.passes import Learned, Passes
from node.model.replica import Replica
from protocol.run.manifest import Manifest
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    peer_of,
    run_swarm,
    stage_nodes,
    until,
)


class FlippedPasses(Passes):
    """What the stage before gets has the wrong sign; the loss is right, and so is the norm."""

    def last_stage(self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf) -> Learned:
        loss, by_inputs = super().last_stage(inputs, labels, most)
        return loss, None if by_inputs is None else -by_inputs

    def backward(self, *args: torch.Tensor) -> torch.Tensor | None:
        by_inputs = super().backward(*args)
        return None if by_inputs is None else -by_inputs


class Flipped(Replica):
    def __init__(self, manifest: Manifest, stage: int, device: str) -> None:
        super().__init__(manifest, stage, device)
        self.passes = FlippedPasses(self.stage, self.device, self.slow_weights())


async def with_flipped(stage: int, replicas: int, **settings: Any) -> SimulatedSwarm:
    """The first replica of a stage is one."""
    swarm: SimulatedSwarm = micro_swarm(inner__total_steps=FOREVER, **settings)
    await swarm.seed_peer.start()
    for number in range(replicas * swarm.manifest.stages):
        swarm.add(
            number, stage=number % swarm.manifest.stages, replica=Flipped if number == stage else Replica
        )
    await everyone_reaches(swarm, 2)
    return swarm


@pytest.mark.long
@pytest.mark.parametrize(("stages", "stage"), [(2, 1), (3, 1)])
def test_gradients_of_the_wrong_sign_are_found_and_nobody_else_is_blamed(stages: int, stage: int) -> None:
    """Failed before: they count as any others, for ever."""

    async def main() -> None:
        swarm = await with_flipped(stage, replicas=4, stages=stages, model__layers=stages, checked=0.1)
        liar = peer_of(swarm.nodes[stage])
        before = stage_nodes(swarm, stage - 1)
        await until(
            lambda: all(found_by(swarm, n) for n in swarm.nodes if swarm.nodes[n] in before), 300, 1.0
        )
        assert {event["peer"] for event in events_of(swarm, "wrong-answers")} == {liar}
        await asyncio.sleep(5)  # what it had already comes back
        sent = [node.context.counters.sent.get(liar, 0) for node in before]
        await everyone_goes_on(swarm, 0)
        goals = {node: node.replica.step + 20 for node in before}
        await until(lambda: all(node.replica.step >= goal for node, goal in goals.items()))
        assert [
            node.context.counters.sent.get(liar, 0) - old for node, old in zip(before, sent, strict=True)
        ] == [0] * len(before)
        await swarm.leave()

    run_swarm(main())


def found_by(swarm: SimulatedSwarm, number: int) -> bool:
    return bool(events_of(swarm, "wrong-answers", number))


@pytest.mark.long
def test_checks_cost_what_the_manifest_says_and_make_the_honest_trusted() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER, checked=0.05)
        await swarm.start(4)
        await everyone_reaches(swarm, 150)
        first, last = stage_nodes(swarm, 0), stage_nodes(swarm, 1)
        assert not events_of(swarm, "wrong-answers")
        drawn = sum(node.context.counters.received for node in first)
        computed = sum(node.context.counters.received for node in last)
        assert computed / drawn == pytest.approx(1.05, abs=0.02)
        proven = [node.context.view.ledger.is_proven(peer_of(other)) for node in first for other in last]
        print(
            f"{computed / drawn - 1:.3f} more work; {sum(proven)} of {len(proven)} are trusted after 150 steps"
        )
        assert sum(proven) >= len(proven) / 4
        await swarm.leave()

    run_swarm(main())
