"""Whole swarms in one process, from the daemon's own code: they train.

All times are virtual. The same seed gives the same run, so nothing here is flaky.
"""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.fragment import Fragment, PairPull
from node.model.replica import Replica
from node.process.daemon import Node
from node.rounds.gossip import PairAverager
from node.rounds.meeting import Pair
from protocol.messages.training import Propose
from protocol.records.identity import Identity
from tests.swarm.micro import (
    FOREVER,
    events_of,
    mean_losses,
    micro_swarm,
    peer_of,
    run_swarm,
    stage_nodes,
    trained,
    training,
    true_spread,
    until,
)
from tests.unit.two_ends import whole_of


@pytest.mark.long
def test_sixteen_nodes_train_and_the_same_seed_gives_the_same_run_event_for_event() -> None:
    logs = [run_swarm(trained(8, seed=seed, inner__total_steps=15)).events for seed in (1, 1, 2)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]
    assert len({event["node"] for event in logs[0] if event["event"] == "finished"}) == 16


def test_the_loss_falls() -> None:
    swarm = run_swarm(trained(2, inner__total_steps=60))
    before, after = mean_losses(swarm, 10, 10)
    assert before > 5.0  # about ln 256
    assert after < 2.8  # the words are made of twelve letters and a space: ln 13 is 2.56


@pytest.mark.long
def test_an_odd_number_of_replicas_mix_and_stay_together() -> None:
    swarm = run_swarm(trained(3, inner__total_steps=100))
    for node in stage_nodes(swarm, 0):
        assert set(node.context.counters.sent) == {peer_of(other) for other in stage_nodes(swarm, 1)}
    for node in swarm.nodes.values():
        assert len(node.context.counters.partners) == 2
    for stage in (0, 1):
        nodes = stage_nodes(swarm, stage)
        start = Replica(swarm.manifest, stage).phi
        moved = float((nodes[0].replica.phi - start).square().mean().sqrt())
        assert 0 < true_spread(nodes) < 0.2 * moved


@pytest.mark.long
def test_the_live_estimate_of_the_spread_is_near_the_truth() -> None:
    async def main() -> None:
        swarm = await training(3, step=40, stages=1, inner__total_steps=FOREVER)
        true, estimated = list[float](), list[float]()
        for _ in range(24):
            await asyncio.sleep(0.25)
            true.append(true_spread(swarm.nodes.values()))
            estimated += [node.context.counters.spread or math.nan for node in swarm.nodes.values()]
        ratio = (sum(estimated) / len(estimated)) / (sum(true) / len(true))
        assert 0.6 < ratio < 1.7
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 3])
def test_other_numbers_of_stages_train_too(stages: int) -> None:
    swarm = run_swarm(trained(2, stages=stages, model__layers=3))
    before, after = mean_losses(swarm, 10, 10)
    assert after < before - 1
    assert all(node.replica.step >= 20 for node in swarm.nodes.values())


@pytest.mark.long
def test_a_swarm_with_no_faults_has_no_resends_and_blames_nobody() -> None:
    swarm = run_swarm(trained(3, inner__total_steps=100))
    assert not events_of(swarm, "resend")
    timeouts = [event for event in events_of(swarm, "exchange-failed") if event["reason"] != "Refused"]
    assert len(timeouts) <= 0.02 * len(events_of(swarm, "round"))


@pytest.mark.long
def test_a_slow_peer_gets_less_work_and_delays_nobody() -> None:
    async def main() -> SimulatedSwarm:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        for number in range(6):
            swarm.add(number, stage=number % 2, speed=0.1 if number == 1 else 1.0)
        await asyncio.sleep(12)
        await swarm.leave()
        return swarm

    swarm = run_swarm(main())
    slow, *fast = stage_nodes(swarm, 1)
    assert slow.replica.step > 0
    assert all(node.replica.step > 2 * slow.replica.step for node in fast)


def test_partners_pull_at_each_other_alike_also_with_a_lossy_codec() -> None:
    pulls: dict[int, torch.Tensor] = {}

    def remember(number: int, node: Node) -> None:
        finish = node.replica.finish_round_with

        def finish_and_remember(own: Fragment, pull: PairPull) -> None:
            pulls[number] = whole_of(pull, own)
            finish(own, pull)

        node.replica.finish_round_with = finish_and_remember  # type: ignore[method-assign]

    async def main() -> None:
        swarm = await training(2, step=1, stages=1, wire__gossip="int8", inner__total_steps=FOREVER)
        for number, node in swarm.nodes.items():
            remember(number, node)
        await until(lambda: len([e for e in events_of(swarm, "round") if e["partner"]]) >= 2)
        await swarm.leave()

    run_swarm(main())
    assert torch.allclose(pulls[0], -pulls[1], atol=1e-6)


def test_a_proposal_at_the_very_end_of_a_round_is_kept_for_the_next_one() -> None:
    async def main() -> None:
        swarm = await training(1, stages=1, inner__total_steps=FOREVER)
        node = swarm.nodes[0]
        averager = node.rounds.averager
        assert isinstance(averager, PairAverager)
        matchmaker = averager.matchmaker
        partner = Identity.from_seed("partner").peer_id

        async def propose(name: str) -> None:
            times: dict[str, Any] = {"opens_in": 0.0, "due_in": 0.0, "ends_in": 60.0, "step_seconds": 0.0}
            proposal = Propose(stage=0, round=node.replica.round, pair=name, **times)
            request: Any = SimpleNamespace(peer=partner, message=proposal)
            await matchmaker.on_propose(request)
            assert matchmaker.is_expected(name, partner)
            assert matchmaker.pair is None
            await until(lambda: matchmaker.pair == Pair(partner, name), seconds=1.0, step=0.005)

        finish = node.replica.finish_round_alone

        def finish_while_asked(own: Fragment) -> None:
            if matchmaker.pair is None:  # nor at the end of a round whose partner did not come
                ask()
            finish(own)

        def ask() -> None:
            asking.append(asyncio.get_running_loop().create_task(propose(f"p{len(asking)}")))

        asking: list[asyncio.Task[None]] = []
        node.replica.finish_round_alone = finish_while_asked  # type: ignore[method-assign]
        await until(lambda: len(asking) >= 5)
        await asyncio.gather(*asking[:5])
        await swarm.leave()

    run_swarm(main())
