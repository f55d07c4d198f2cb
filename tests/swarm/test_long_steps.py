"""Rounds of replicas whose inner steps take longer than an exchange ever does."""

from __future__ import annotations

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from tests.swarm.micro import (
    FOREVER,
    WIDE,
    all_reached,
    events_of,
    micro_corpus,
    micro_manifest,
    run_swarm,
    until,
)

REPLICAS, STEPS, INNER_STEPS = 4, 120, 12


def work_seconds(stage: int, priority: Priority) -> float:
    """Eight seconds an inner step of two microbatches; the manifest gives an exchange five."""
    return 0.005 if priority in (Priority.OPTIMIZER, Priority.SERVE) else 4.0


def test_a_partner_is_waited_for_until_it_has_ended_its_step() -> None:
    """Before, whoever was at the end of its round first gave up five seconds later: two of five rounds were alone."""

    async def main() -> None:
        manifest = micro_manifest(
            stages=1, inner__total_steps=FOREVER, outer__inner_steps=INNER_STEPS, limits__gossip_deadline=5.0
        )
        swarm = SimulatedSwarm(manifest, micro_corpus(), 1, WIDE, seconds=work_seconds)
        await swarm.seed_peer.start()
        for number in range(REPLICAS):
            swarm.add(number, stage=0, speed=1.0 if number % 2 else 0.95)
        await until(lambda: all_reached(swarm.nodes.values(), STEPS), 1e5, 1.0)
        rounds = events_of(swarm, "round")
        assert len(rounds) >= REPLICAS * (STEPS // INNER_STEPS - 2)
        assert not events_of(swarm, "exchange-failed")
        assert sum(event["partner"] is None for event in rounds) <= len(rounds) / 10
        await swarm.leave()

    run_swarm(main())
