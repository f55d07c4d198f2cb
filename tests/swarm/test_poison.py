"""One replica of a whole swarm sends poison: without the defence training is lost, with it nothing much happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bootstrap.lab.simulation.attackers import Attack, Attacker
from node.model.replica import Replica
from protocol.run.manifest import Manifest
from tests.swarm.micro import events_of, mean_losses, micro_swarm, run_swarm

HONEST = 5


async def attacked(clip: float) -> Any:
    """The last of six replicas averages with the reverse of its progress, ten times as long."""
    swarm = micro_swarm(stages=1, outer__clip=clip, inner__total_steps=200)

    def honest() -> list[Replica]:
        return [swarm.nodes[number].replica for number in range(HONEST) if number in swarm.nodes]

    def attacker(manifest: Manifest, stage: int, device: str) -> Replica:
        return Attacker(manifest, stage, device, attack=Attack("sign-flip"), honest=honest)

    await swarm.seed_peer.start()
    for number in range(HONEST):
        swarm.add(number, stage=0)
    swarm.add(HONEST, stage=0, replica=attacker)
    await swarm.finish()
    swarm.events[:] = [event for event in swarm.events if event["node"] != HONEST]
    return swarm


@pytest.mark.long
def test_without_the_defence_one_liar_ruins_the_run() -> None:
    async def main() -> None:
        early, late = mean_losses(await attacked(clip=0.0), 20, 50)
        assert late > early - 0.1

    run_swarm(main())


@pytest.mark.long
def test_with_the_defence_the_others_learn_and_leave_the_liar_alone() -> None:
    async def main() -> None:
        swarm = await attacked(clip=1.5)
        early, late = mean_losses(swarm, 20, 50)
        assert late < early - 0.3
        liar = swarm.nodes[HONEST].context.me
        blamed = Counter(event["partner"] for event in events_of(swarm, "quarantined"))
        assert blamed[liar] >= HONEST - 2
        # in a stage this small one honest replica may look odd to one
        assert blamed.total() - blamed[liar] <= 1

    run_swarm(main())
