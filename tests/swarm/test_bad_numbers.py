"""NaN, infinity and absurd numbers in one replica of eight: nobody dies, nobody else is harmed, its owner is told."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from bootstrap.simulation.swarm import SimulatedSwarm
from node.model.passes import evaluate_through
from protocol.errors import NodeFailed
from tests.swarm.broken import Place, broken
from tests.swarm.micro import micro_corpus, micro_swarm, run_swarm

REPLICAS, STEPS = 4, 80
ABSURD = 1e30
TOLERANCE = 0.05  # nats per token
TOLD = {"non-finite", "step-left-out", "weights-lost", "microbatches-dropped"}


def validation_loss(swarm: SimulatedSwarm, without: int | None) -> float:
    """Mean over the routes of the replicas that are not broken, of their slow weights."""
    nodes = [node for number, node in swarm.nodes.items() if number != without]
    firsts = [node.replica.passes for node in nodes if node.context.stage == 0]
    lasts = [node.replica.passes for node in nodes if node.context.stage == 1]
    tokens, labels = next(iter(micro_corpus().validation_batches(32, 64, 64)))
    inputs, targets = torch.as_tensor(tokens), torch.as_tensor(labels)
    losses = [
        F.cross_entropy(evaluate_through([first, last], inputs).flatten(0, 1), targets.flatten().long())
        for first, last in itertools.product(firsts, lasts)
    ]
    return float(torch.stack(losses).mean())


async def trained(stage: int | None, place: Place = "loss", value: float = math.nan) -> SimulatedSwarm:
    """Two stages of four replicas to the end of their steps; the last one added is broken at `place`."""
    swarm: SimulatedSwarm = micro_swarm(inner__total_steps=STEPS)
    await swarm.seed_peer.start()
    for number in range(2 * REPLICAS - 1):
        swarm.add(number, stage=(number + (stage == 1)) % 2)
    swarm.add(
        2 * REPLICAS - 1, stage=1 if stage is None else stage,
        **({} if stage is None else {"replica": broken(place, value)}),
    )  # fmt: skip
    with contextlib.suppress(NodeFailed):  # the broken one may end, with a sentence
        await swarm.finish()
        return swarm
    swarm.tasks.pop(2 * REPLICAS - 1)
    swarm.nodes.pop(2 * REPLICAS - 1)
    await swarm.finish()
    return swarm


@cache
def undisturbed() -> float:
    async def main() -> float:
        return validation_loss(await trained(None), None)

    loss: float = run_swarm(main())
    return loss


CASES: list[tuple[int, Place, float]] = [
    (0, "activations", math.nan),
    (0, "activations", math.inf),
    (0, "norms", math.inf),
    (0, "norms", ABSURD),
    (0, "weights", math.nan),
    (1, "gradients", math.nan),
    (1, "gradients", math.inf),
    (1, "gradients", ABSURD),
    (1, "loss", math.nan),
    (1, "loss", math.inf),
    (1, "norms", math.nan),
    (1, "weights", math.inf),
]


@pytest.mark.parametrize(("stage", "place", "value"), CASES)
def test_one_broken_replica_of_eight_harms_nobody_else(stage: int, place: Place, value: float) -> None:
    async def main() -> None:
        swarm = await trained(stage, place, value)
        bad = 2 * REPLICAS - 1
        loss = validation_loss(swarm, bad)
        print(f"{place} {value} at stage {stage}: {loss:.4f}, undisturbed {undisturbed_loss:.4f}")
        assert loss < undisturbed_loss + TOLERANCE
        for number in range(bad):
            assert torch.isfinite(swarm.nodes[number].replica.flat.values).all()
        told = Counter(
            event["event"] for event in swarm.events if event["node"] == bad and event["event"] in TOLD
        )
        assert told or value == ABSURD, "its owner was told nothing"
        assert max(told.values(), default=0) <= 5, told  # not with every microbatch

    undisturbed_loss = undisturbed()
    run_swarm(main())
