"""Swarms that overlap their exchanges with training: they learn, stay together and survive kills in every mode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory_link import Link
from node.model.replica import Replica
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_goes_on,
    mean_losses,
    run_swarm,
    stage_nodes,
    trained,
    training,
    true_spread,
    until,
)

MODES: list[dict[str, Any]] = [
    {"outer__overlap": "none"},
    {"outer__overlap": "phi-early", "wire__progress": "fp32"},
    {"outer__overlap": "phi-early", "wire__progress": "int8"},
]
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))


@pytest.mark.long_but("phi-early-fp32")
@every_mode
def test_it_trains_and_the_replicas_stay_together(mode: dict[str, Any]) -> None:
    swarm = run_swarm(trained(4, inner__total_steps=80, **mode))
    before, after = mean_losses(swarm, 10, 10)
    assert before > 5.0
    assert after < 2.8
    rounds = events_of(swarm, "round")
    paired = [event for event in rounds if event["partner"] is not None]
    assert len(paired) > 0.8 * len(rounds)
    for stage in (0, 1):
        nodes = stage_nodes(swarm, stage)
        start = Replica(swarm.manifest, stage).phi
        moved = float((nodes[0].replica.phi - start).square().mean().sqrt())
        assert 0 < true_spread(nodes) < 0.2 * moved


@pytest.mark.long_but("phi-early-int8")
@every_mode
def test_the_same_seed_gives_the_same_run(mode: dict[str, Any]) -> None:
    logs = [run_swarm(trained(2, inner__total_steps=15, **mode)).events for _ in range(2)]
    assert logs[0] == logs[1]


@pytest.mark.long_but("phi-early-fp32")
@every_mode
def test_a_kill_costs_the_partner_a_round_alone_and_nobody_else_anything(mode: dict[str, Any]) -> None:
    async def main() -> None:
        swarm = await training(4, step=12, inner__total_steps=FOREVER, **mode)
        for victim in (1, 4):
            await asyncio.sleep(0.137)
            swarm.kill(victim)
        await everyone_goes_on(swarm, 30)
        for node in swarm.nodes.values():
            assert node.context.counters.partners
        survivors = [event for event in events_of(swarm, "round") if event["node"] in swarm.nodes]
        assert any(event["partner"] is not None for event in survivors[-8:])
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@every_mode
def test_streams_that_break_delay_a_round_and_no_more(mode: dict[str, Any]) -> None:
    faulty = Link(latency=0.01, jitter=0.01, open_loss=0.02, write_loss=0.02)
    swarm = run_swarm(trained(4, link=faulty, inner__total_steps=60, **mode))
    rounds = events_of(swarm, "round")
    assert sum(event["partner"] is not None for event in rounds) > 0.6 * len(rounds)
    before, after = mean_losses(swarm, 10, 10)
    assert after < before - 2


@pytest.mark.long
def test_a_late_joiner_downloads_a_state_that_it_can_train_from() -> None:
    async def main() -> None:
        swarm = await training(2, step=22, inner__total_steps=FOREVER, outer__overlap="phi-early")
        newcomer = swarm.add(9, stage=0)
        await until(lambda: newcomer.public_state == "serving")
        members = [node for node in stage_nodes(swarm, 0) if node is not newcomer]
        start = Replica(swarm.manifest, 0).phi
        moved = (members[0].replica.phi - start).norm()
        assert (newcomer.replica.phi - members[0].replica.phi).norm() < 0.5 * moved
        await until(lambda: len(newcomer.context.counters.partners) == 2)
        await swarm.leave()

    run_swarm(main())


def blocked(mode: dict[str, Any]) -> tuple[float, float]:
    """Seconds that a paired round keeps a replica from training, and what it sends, on links of home users."""
    slow = Link(latency=0.02, bandwidth=250_000.0)
    settings: dict[str, Any] = {"stages": 1, "outer__inner_steps": 20, "inner__total_steps": 140, **mode}
    swarm = run_swarm(trained(2, link=slow, **settings))
    rounds = [event for event in events_of(swarm, "round") if event["partner"] is not None][2:-2]
    mean_blocked = sum(event["blocked_seconds"] for event in rounds) / len(rounds)
    total = sum(node.context.counters.blocked_seconds for node in swarm.nodes.values())
    assert total >= sum(event["blocked_seconds"] for event in rounds)
    return mean_blocked, sum(event["gossip_bytes"] for event in rounds) / len(rounds)


@pytest.mark.long
def test_overlap_takes_the_exchange_off_the_time_that_training_waits() -> None:
    none, int8 = (blocked(mode) for mode in (MODES[0], MODES[2]))
    assert int8[0] < 0.8 * none[0]
    assert int8[1] == pytest.approx(1.25 * none[1], rel=0.1)  # 4 bytes a parameter early, 1 at the end


def test_the_counters_say_what_the_events_say() -> None:
    swarm = run_swarm(trained(2, stages=1, inner__total_steps=40))
    for number, node in swarm.nodes.items():
        rounds = events_of(swarm, "round", node=number)
        counters = node.context.counters
        assert counters.gossip_bytes == sum(event["gossip_bytes"] for event in rounds) > 0
        assert counters.blocked_seconds == pytest.approx(sum(e["blocked_seconds"] for e in rounds), abs=1e-4)
