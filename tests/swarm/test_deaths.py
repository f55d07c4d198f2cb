"""A swarm survives peers that die, freeze or are cut off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory import memory_address
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from protocol.errors import TransportDown
from protocol.transport.base import Stream
from tests.swarm.micro import (
    FOREVER,
    all_reached,
    assert_exact_admission,
    events_of,
    everyone_goes_on,
    numbers_of_stage,
    peer_of,
    run_swarm,
    stage_nodes,
    step_of,
    training,
    until,
)


def test_a_node_killed_in_mid_run_costs_resends_and_the_rest_finish() -> None:
    async def main() -> SimulatedSwarm:
        swarm = await training(3, step=8)
        swarm.kill(1)
        await swarm.finish()
        return swarm

    swarm = run_swarm(main())
    assert {event["node"] for event in events_of(swarm, "finished")} == {0, 2, 3, 4, 5}
    assert sum(node.context.counters.resends for node in stage_nodes(swarm, 0)) == len(
        events_of(swarm, "resend")
    )
    assert events_of(swarm, "resend")
    assert_exact_admission(swarm)


def test_a_dead_stage_pauses_the_one_before_until_a_new_replica_joins() -> None:
    async def main() -> None:
        swarm = await training(2, step=8)
        for number in numbers_of_stage(swarm, 1):
            swarm.kill(number)
        await asyncio.sleep(10)
        paused = [step_of(node) for node in swarm.nodes.values()]
        assert {event["node"] for event in events_of(swarm, "no-peer")} == {0, 2}
        await asyncio.sleep(10)
        assert [step_of(node) for node in swarm.nodes.values()] == paused
        swarm.add(9, stage=1)
        await swarm.finish()
        assert all_reached(stage_nodes(swarm, 0), 30)

    run_swarm(main())


def test_a_partner_killed_between_agreement_and_exchange_leaves_the_other_to_end_its_round() -> None:
    async def main() -> None:
        swarm = await training(2, step=1, outer__inner_steps=20, inner__total_steps=FOREVER)
        first = swarm.nodes[0]
        await until(lambda: first.rounds.averager.pair is not None)
        agreed = first.rounds.averager.pair
        assert agreed is not None
        swarm.kill(next(n for n, node in swarm.nodes.items() if peer_of(node) == agreed.partner))
        rounds = len(events_of(swarm, "round", node=0))
        await until(lambda: len(events_of(swarm, "round", node=0)) > rounds)
        assert events_of(swarm, "round", node=0)[-1]["partner"] is None
        assert not events_of(swarm, "exchange-failed", node=0)  # it asked in the middle of the round
        await everyone_goes_on(swarm, 30)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_frozen_peer_only_costs_deadlines() -> None:
    async def main() -> None:
        swarm = await training(3, inner__total_steps=FOREVER)
        frozen = swarm.nodes[1]
        swarm.network.freeze(peer_of(frozen))
        others = [node for node in swarm.nodes.values() if node is not frozen]
        goal = max(step_of(node) for node in others) + 40
        await until(lambda: all_reached(others, goal), seconds=300)
        assert events_of(swarm, "resend")
        swarm.network.thaw(peer_of(frozen))
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


async def resends_of_a_stall(**changes: Any) -> tuple[int, int]:
    """One node for each stage; the second one freezes for 8 s, and then both go on at once.

    Returns how many resends there were until it thawed, and until they had done two more steps.
    """
    swarm = await training(1, inner__total_steps=FOREVER, inner__microbatches=16, **changes)
    silent = peer_of(stage_nodes(swarm, 1)[0])
    swarm.network.freeze(silent)
    await asyncio.sleep(8)
    swarm.network.thaw(silent)
    meanwhile = len(events_of(swarm, "resend"))
    goal = step_of(swarm.nodes[0]) + 2
    await until(lambda: step_of(swarm.nodes[0]) >= goal, seconds=10)
    in_all = len(events_of(swarm, "resend"))
    await swarm.leave()
    return meanwhile, in_all


def test_the_only_peer_may_stall_and_nothing_is_sent_twice() -> None:
    assert run_swarm(resends_of_a_stall()) == (0, 0)


def test_the_only_peer_is_asked_again_at_once_when_it_answers_after_the_manifests_deadline() -> None:
    meanwhile, _ = run_swarm(
        resends_of_a_stall(limits__record_lifetime=60.0, limits__microbatch_deadline=5.0)
    )
    assert meanwhile > 4  # so many were under way


def test_a_network_daemon_that_restarts_pauses_its_node_and_does_not_end_it() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        transport: Any = swarm.nodes[0].transport
        real = transport.open

        async def down(*_: Any, **__: Any) -> Stream:
            raise TransportDown("p2pd is not running at present")

        transport.open = down
        for stream in transport.streams:
            stream.break_off()
        await asyncio.sleep(3)
        transport.open = real
        await everyone_goes_on(swarm)
        assert not swarm.tasks[0].done()
        assert swarm.nodes[0].public_state == "serving"
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_both_sides_of_a_partition_train_and_meet_again() -> None:
    async def main() -> None:
        swarm = await training(4, inner__total_steps=FOREVER)
        sides = [[swarm.nodes[n] for n in range(4)], [swarm.nodes[n] for n in range(4, 8)]]
        swarm.network.partition(*([peer_of(node) for node in side] for side in sides))
        await asyncio.sleep(15)
        await everyone_goes_on(swarm, 20)
        swarm.network.heal()
        for node in swarm.nodes.values():
            node.context.counters.partners.clear()
        here, there = ({peer_of(node) for node in side} for side in sides)
        await until(lambda: any(there & set(node.context.counters.partners) for node in sides[0]), 600)
        await until(lambda: any(here & set(node.context.counters.partners) for node in sides[1]), 600)
        assert all(step_of(node) > 0 for node in swarm.nodes.values())
        await swarm.leave()

    run_swarm(main())


def test_the_seed_peer_may_die_and_a_plain_member_welcomes_newcomers() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        swarm.network.kill(swarm.seed_peer.transport.peer_id)
        await everyone_goes_on(swarm)
        newcomer = swarm.add(9, stage=1, join=memory_address(peer_of(swarm.nodes[2])))
        await until(lambda: step_of(newcomer) > 0 and newcomer.context.counters.partners != {})
        assert set(newcomer.context.counters.partners) <= {peer_of(node) for node in swarm.nodes.values()}
        await swarm.leave()

    run_swarm(main())
