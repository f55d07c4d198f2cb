"""The baselines are settings of the same daemon: DiLoCo, plain averaging, none, and fixed routing."""

from __future__ import annotations

import pytest

from tests.swarm.micro import (
    FOREVER,
    all_reached,
    events_of,
    mean_losses,
    micro_swarm,
    run_swarm,
    stage_nodes,
    trained,
    true_spread,
    until,
)


@pytest.mark.long_but("2")
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_diloco_makes_all_replicas_equal(replicas: int) -> None:
    """Those that met too late to share the first rounds, too: the pull toward the mean closes the gap."""

    async def main() -> None:
        swarm = micro_swarm(stages=1, outer__method="diloco", inner__total_steps=FOREVER)
        await swarm.start(replicas)
        await until(lambda: all_reached(swarm.nodes.values(), 50))
        await until(lambda: true_spread(stage_nodes(swarm, 0)) < 1e-6)
        early, late = mean_losses(swarm, 5, 5)
        assert late < early
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_diloco_sends_what_a_ring_would() -> None:
    async def main() -> None:
        swarm = await trained(4, stages=1, outer__method="diloco", inner__total_steps=100)
        rounds = [events_of(swarm, "round", node=number)[10] for number in range(4)]
        state = 4 * stage_nodes(swarm, 0)[0].replica.parameters
        sent = sum(event["gossip_bytes"] for event in rounds) / len(rounds)
        assert sent == pytest.approx(2 * 3 / 4 * state, rel=0.01)

    run_swarm(main())


@pytest.mark.long
def test_diloco_goes_on_when_a_replica_is_killed() -> None:
    async def main() -> None:
        swarm = micro_swarm(stages=1, outer__method="diloco", inner__total_steps=FOREVER)
        await swarm.start(3)
        await until(lambda: all_reached(swarm.nodes.values(), 10))
        swarm.kill(2)
        reached = {node: node.replica.step + 50 for node in swarm.nodes.values()}
        await until(lambda: all(node.replica.step >= step for node, step in reached.items()))
        await until(lambda: true_spread(stage_nodes(swarm, 0)) < 1e-6)
        assert all(node.replica.round >= 12 for node in swarm.nodes.values())  # 5 steps to a round
        before, after = mean_losses(swarm, 10, 10)
        assert after < before
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_without_averaging_replicas_go_their_own_ways_and_nothing_is_sent() -> None:
    async def main() -> None:
        local = await trained(3, stages=1, outer__method="local")
        assert not any(event["partner"] for event in events_of(local, "round"))
        assert all(node.context.counters.gossip_bytes == 0 for node in stage_nodes(local, 0))
        averaged = await trained(3, stages=1, outer__method="average")
        assert true_spread(stage_nodes(averaged, 0)) < 0.5 * true_spread(stage_nodes(local, 0))

    run_swarm(main())


@pytest.mark.long
def test_fixed_routing_makes_pipelines_of_their_own() -> None:
    async def main() -> None:
        swarm = await trained(3, stages=2, routing="fixed", inner__total_steps=60)
        receivers = [dict(node.context.counters.sent) for node in stage_nodes(swarm, 0)]
        favourites = [max(sent, key=lambda peer: sent[peer]) for sent in receivers]
        assert len(set(favourites)) == 3
        assert all(max(sent.values()) > 0.8 * sum(sent.values()) for sent in receivers)

    run_swarm(main())
