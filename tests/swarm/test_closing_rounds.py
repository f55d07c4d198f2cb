"""After its last inner step a stage goes on to average, so that each replica alone is nearly the mean of all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from node.model.replica import Replica
from node.service import trainer
from tests.swarm.micro import (
    all_reached,
    events_of,
    micro_manifest,
    micro_swarm,
    run_swarm,
    stage_nodes,
    trained,
    true_spread,
    until,
)

REPLICAS = 4


async def outcome(seed: int, **settings: Any) -> tuple[float, float]:
    """The spread at the end, as a mean square over both stages, and the rounds of a replica."""
    swarm = await trained(REPLICAS, seed=seed, inner__total_steps=30, **settings)
    assert {node.replica.step for node in stage_nodes(swarm, 0)} == {30}  # they train no further
    squares = [true_spread(stage_nodes(swarm, stage)) ** 2 for stage in range(2)]
    rounds = sum(len(events_of(swarm, "round", node=number)) for number in swarm.nodes)
    await swarm.leave()
    return sum(squares) / 2, rounds / len(swarm.nodes)


@pytest.mark.parametrize(("overlap", "gossip"), [("none", "int8"), ("phi-early", "int8"), ("none", "mod3")])
def test_they_take_most_of_the_distance_away(
    overlap: str, gossip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"wire__gossip": gossip, "outer__overlap": overlap}
    with_them = [run_swarm(outcome(seed, **settings)) for seed in range(3)]
    monkeypatch.setattr(trainer, "CLOSING_ROUNDS", 0)
    without = [run_swarm(outcome(seed, **settings)) for seed in range(3)]
    apart, before = (math.sqrt(sum(square for square, _ in each) / 3) for each in (with_them, without))
    more = sum(rounds for _, rounds in with_them) / 3 - sum(rounds for _, rounds in without) / 3
    print(f"spread {before:.2e} → {apart:.2e} with {more:.1f} rounds more")
    assert apart < 0.5 * before
    assert 2 <= more <= 8


async def rounds_alone_of_the_last_one(seed: int) -> int:
    """Of the last three of a replica that is a little slower than the other three: earlier ones are by chance."""
    swarm = micro_swarm(seed=seed, stages=1, inner__total_steps=300)
    await swarm.seed_peer.start()
    for number in range(REPLICAS):
        swarm.add(number, stage=0, speed=0.97 if number == 0 else 1.0)  # well within what they wait
    await until(lambda: all_reached(swarm.nodes.values(), 1))
    await swarm.finish()
    return sum(event["partner"] is None for event in events_of(swarm, "round", node=0)[-3:])


@pytest.mark.long
def test_one_that_ends_a_little_later_is_seldom_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait may have paired off by then, so that it is alone now and then."""
    seeds = range(1, 5)
    waited = [run_swarm(rounds_alone_of_the_last_one(seed)) for seed in seeds]
    monkeypatch.setattr(trainer, "WAITED", 0.0)
    left = [run_swarm(rounds_alone_of_the_last_one(seed)) for seed in seeds]
    print(f"alone {waited}, without waiting {left}")
    assert sum(waited) < 0.6 * sum(left)


async def steps_at_unequal_speed(method: str) -> set[int]:
    swarm = micro_swarm(stages=1, inner__total_steps=60, outer__method=method)
    await swarm.seed_peer.start()
    for number in range(REPLICAS):
        swarm.add(number, stage=0, speed=0.8 if number == 0 else 1.0)
    await swarm.finish()
    return {node.replica.step for node in swarm.nodes.values()}


@pytest.mark.parametrize("method", ["diloco", "local"])
def test_without_pairs_nobody_waits_for_them(method: str) -> None:
    """Those that have finished have nobody to look for, though others train on."""
    assert run_swarm(steps_at_unequal_speed(method)) == {60}


@pytest.mark.parametrize("stops", [True, False])
def test_momentum_moves_nothing_in_them(stops: bool) -> None:
    """α would carry φ on by what the rounds before had learned, with nobody to correct it."""
    replica = Replica(micro_manifest(outer__alpha=0.5), 1)
    replica.flat.values.add_(0.01)
    replica.finish_round_alone(replica.whole)
    before = replica.phi.clone()
    if stops:
        replica.stop_momentum()
    replica.finish_round_alone(replica.whole)
    assert torch.equal(replica.phi, before) is stops
    assert torch.equal(replica.flat.values, replica.phi)
