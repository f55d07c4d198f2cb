"""What the nodes say about how far apart they are, against the weights of all replicas side by side."""

from __future__ import annotations

import asyncio
import random

import pytest

from bootstrap.inspect.observer import Observer, sampled_spreads, spread_of_all
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from tests.swarm.micro import (
    all_reached,
    micro_swarm,
    observer_of,
    run_swarm,
    stage_nodes,
    true_spread,
    until,
)

REPLICAS = 5
FOREVER = 100_000


@pytest.mark.long
def test_the_live_estimate_is_within_ten_per_cent_of_the_true_spread() -> None:
    """Means of squares over a dozen seconds: each estimate rests on eight meetings, so one alone is worth 25 %."""

    async def main() -> tuple[float, float, float]:
        swarm = micro_swarm(
            stages=1, inner__total_steps=FOREVER, inner__learning_rate=2e-3, inner__min_learning_rate=2e-3
        )
        await swarm.start(REPLICAS)
        await until(lambda: all_reached(swarm.nodes.values(), 60))
        true, estimated, expected = [], [], []
        for _ in range(60):
            await asyncio.sleep(0.2)
            nodes = stage_nodes(swarm, 0)
            true.append(true_spread(nodes) ** 2)
            estimated += [node.context.counters.spread or 0.0 for node in nodes]
            expected += [node.context.counters.expected_spread or 0.0 for node in nodes]
        await swarm.leave()
        return (
            (sum(true) / len(true)) ** 0.5,
            (sum(value**2 for value in estimated) / len(estimated)) ** 0.5,
            (sum(value**2 for value in expected) / len(expected)) ** 0.5,
        )

    true, estimated, expected = run_swarm(main())
    print(f"spread: true {true:.3e}, estimated {estimated:.3e}, by theory {expected:.3e}")
    assert estimated == pytest.approx(true, rel=0.1)
    assert expected == pytest.approx(true, rel=0.35)  # the theory knows independent noise and pairs of all


def reached(swarm: SimulatedSwarm, step: int) -> bool:
    """Whether all train and the first of them is as far as that."""
    nodes = swarm.nodes.values()
    return all_reached(nodes, 1) and max(node.replica.step for node in nodes) >= step


async def sampled(visitor: Observer, seed: int) -> float | None:
    return spread_of_all(visitor.manifest, await sampled_spreads(visitor, random.Random(seed)))


def true_spread_of_all(swarm: SimulatedSwarm) -> float:
    """Of stages of the same number of replicas, by their parameters."""
    stages = [stage_nodes(swarm, stage) for stage in range(swarm.manifest.stages)]
    parameters = [nodes[0].replica.parameters for nodes in stages]
    squares = sum(true_spread(nodes) ** 2 * size for nodes, size in zip(stages, parameters, strict=True))
    return float((squares / sum(parameters)) ** 0.5)


async def noted(swarm: SimulatedSwarm, truth: list[float]) -> None:
    """The true spread again and again: of two replicas it is another one between the ends of their rounds."""
    while True:
        await asyncio.sleep(0.001)
        truth.append(true_spread_of_all(swarm))


@pytest.mark.long
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_visitor_sees_the_true_spread_in_a_sample_of_the_weights(replicas: int) -> None:
    """With codecs, clipping, an odd number, rounds of unequal lengths, and a learning rate that falls."""

    async def main() -> list[tuple[float, list[float]]]:
        swarm = micro_swarm(
            wire__gossip="int8", outer__clip=1.5, outer__pace="time", inner__total_steps=80, outer__alpha=0.3
        )
        await swarm.seed_peer.start()
        for number in range(2 * replicas):
            swarm.add(number, stage=number % 2, speed=1.0 / (1 + number // 2))
        visitor = await observer_of(swarm)
        found = []
        for step in (15, 30, 45, 60):
            await until(lambda step=step: reached(swarm, step))  # type: ignore[misc]
            await visitor.survey()
            truth = [true_spread_of_all(swarm)]
            watch = asyncio.get_running_loop().create_task(noted(swarm, truth))
            found_so = await sampled(visitor, step)
            watch.cancel()
            assert found_so is not None
            found.append((found_so, [min(truth), max(truth)]))
        await swarm.leave()
        return found

    for told, (least, most) in run_swarm(main()):
        print(f"spread: true {least:.3e} to {most:.3e} while it was sampled as {told:.3e}")
        assert 0.9 * least < told < 1.1 * most


def test_a_visitor_of_single_replicas_is_told_of_no_spread() -> None:
    async def main() -> float | None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.start(1)
        visitor = await observer_of(swarm)
        await visitor.survey()
        spread = await sampled(visitor, 1)
        await swarm.leave()
        return spread

    assert run_swarm(main()) is None
