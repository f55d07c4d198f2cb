"""A swarm whose rounds average one fragment each: it stays together, lets newcomers in, and ends as one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from node.service import trainer
from tests.swarm.micro import (
    all_reached,
    events_of,
    micro_swarm,
    run_swarm,
    stage_nodes,
    trained,
    true_spread,
    until,
)

REPLICAS = 4
FRAGMENTS: dict[str, Any] = {
    "outer__fragments": 3,
    "outer__inner_steps": 2,
    "outer__alpha": 0.0,
    "outer__beta": 1.0,
    "outer__gamma": 1.0,
}


async def outcome(seed: int, **settings: Any) -> float:
    """The spread at the end, as a mean square; θ is φ then."""
    swarm = await trained(REPLICAS, seed=seed, stages=1, inner__total_steps=30, **FRAGMENTS, **settings)
    for node in swarm.nodes.values():
        assert len(node.replica.fragments) == 3
        assert torch.equal(node.replica.flat.values, node.replica.phi)
    square = true_spread(stage_nodes(swarm, 0)) ** 2
    await swarm.leave()
    return square


@pytest.mark.parametrize("gossip", ["int8", "mod3"])
def test_closing_rounds_average_all_fragments_at_once(gossip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_them = [run_swarm(outcome(seed, wire__gossip=gossip)) for seed in range(2)]
    monkeypatch.setattr(trainer, "CLOSING_ROUNDS", 0)
    without = [run_swarm(outcome(seed, wire__gossip=gossip)) for seed in range(2)]
    apart, before = (math.sqrt(sum(each) / 2) for each in (with_them, without))
    print(f"spread {before:.2e} → {apart:.2e}")
    assert apart < 0.5 * before


def test_a_newcomer_takes_part_in_rounds_of_fragments() -> None:
    async def main() -> None:
        swarm = micro_swarm(stages=1, inner__total_steps=10_000, **FRAGMENTS)
        await swarm.seed_peer.start()
        for number in range(2):
            swarm.add(number, stage=0)
        await until(lambda: all_reached(swarm.nodes.values(), 12))
        newcomer = swarm.add(2, stage=0)
        await until(lambda: all_reached(swarm.nodes.values(), 40))
        partners = [event["partner"] for event in events_of(swarm, "round", node=2)]
        assert sum(partner is not None for partner in partners) > 0.6 * len(partners)
        spread = true_spread(stage_nodes(swarm, 0))
        progress = float((newcomer.replica.flat.values - newcomer.replica.phi).square().mean().sqrt())
        assert spread < 5 * progress  # as far apart as a few rounds of their own make them
        await swarm.leave()

    run_swarm(main())
