"""What a small run has learnt is not lost by what people ordinarily do: pause, move, Ctrl-C, start again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.process.daemon import Node
from protocol.records.lineage import Lineage
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    peer_of,
    run_swarm,
    step_of,
    until,
)

A, B, C = 0, 1, 2  # two replicas of stage 0 and, B, the only one of stage 1
RETURN = 120.0  # seconds that a stage is waited for


async def three_friends(directory: Path, step: int = 40, **changes: Any) -> SimulatedSwarm:
    """A small run as most begin: three nodes, two stages."""
    changes = {"inner__total_steps": FOREVER, "limits__stage_return": RETURN, **changes}
    swarm: SimulatedSwarm = micro_swarm(directory=directory, **changes)
    await swarm.seed_peer.start()
    for number, stage in ((A, 0), (B, 1), (C, 0)):
        swarm.add(number, stage=stage)
    await everyone_reaches(swarm, step)
    return swarm


async def leave(swarm: SimulatedSwarm, number: int) -> None:
    """Press Ctrl-C, and wait until the node has ended."""
    swarm.nodes[number].stop()
    await swarm.tasks.pop(number)
    del swarm.nodes[number]


def recent_loss(swarm: SimulatedSwarm, steps: int = 20) -> float:
    return fmean([e["loss"] for e in events_of(swarm, "step") if e["loss"] is not None][-steps:])


def lineages(swarm: SimulatedSwarm, stage: int) -> set[Lineage]:
    return {n.replica.lineage for n in swarm.nodes.values() if n.stage == stage}


def state_of(swarm: SimulatedSwarm, node: Node, stage: int) -> int:
    """The step of the checkpoint that the node keeps of a stage."""
    state = node.surroundings.state
    assert state is not None
    kept = {kept.stage: kept.step for kept in state.kept(swarm.seed_peer.signed.run_id)}
    return kept.get(stage, 0)


async def moves_to(swarm: SimulatedSwarm, number: int, stage: int) -> None:
    """Have a node do what it does when a stage is in need."""
    node = swarm.nodes[number]
    await node._give_up_stage()
    await node._arrive(1 - stage, stage)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pause_a_move_and_a_ctrl_c_lose_no_stage(seed: int, tmp_path: Path) -> None:
    """Three friends, 2026-11-28: stage 0 was begun anew, and then averaged with the state that came back."""

    async def main() -> None:
        swarm = await three_friends(tmp_path, seed=seed)
        before, begun = recent_loss(swarm), lineages(swarm, 0)
        await leave(swarm, B)
        await leave(swarm, A)
        at = step_of(swarm.nodes[C])
        await leave(swarm, C)  # it was the last one that had stage 0
        for number, stage in ((A, 1), (B, 1)):  # A serves stage 1 now
            swarm.add(number, stage=stage)
        await until(lambda: all(swarm.nodes[n].public_state == "serving" for n in (A, B)))
        await leave(swarm, A)
        swarm.add(A, stage=0)  # and comes back to stage 0
        await everyone_goes_on(swarm)
        assert not events_of(swarm, "initialised")[3:]
        assert not events_of(swarm, "begun-anew")
        assert step_of(swarm.nodes[A]) >= at
        swarm.add(C, stage=0)
        await everyone_goes_on(swarm)
        await everyone_goes_on(swarm, 30)
        assert lineages(swarm, 0) == begun
        assert recent_loss(swarm) < before + 0.1
        assert swarm.nodes[C].context.counters.partners.total
        await swarm.leave()

    run_swarm(main())


def test_a_stage_whose_last_replica_left_waits_for_it_and_says_for_whom(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        peers = {number: peer_of(node) for number, node in swarm.nodes.items()}
        await asyncio.sleep(20)
        await leave(swarm, A)
        at = step_of(swarm.nodes[C])
        await leave(swarm, C)
        stranger = swarm.add(7, stage=0)
        await until(lambda: bool(events_of(swarm, "waiting-for-stage", 7)))
        [waiting] = events_of(swarm, "waiting-for-stage", 7)
        assert waiting["peer"] in (peers[A], peers[C])
        assert waiting["step"] >= at - 10
        await asyncio.sleep(RETURN / 2)
        assert stranger.public_state == "joining"
        swarm.add(C, stage=0)
        await everyone_goes_on(swarm)
        assert not events_of(swarm, "begun-anew")
        assert step_of(stranger) >= at
        await swarm.leave()

    run_swarm(main())


async def begun_anew(directory: Path, **settings: Any) -> SimulatedSwarm:
    """Both replicas of stage 0 have left; a stranger has begun it anew."""
    swarm = await three_friends(directory)
    await asyncio.sleep(20)
    await leave(swarm, A)
    await leave(swarm, C)
    swarm.add(7, stage=0, **settings)
    await until(lambda: swarm.nodes[7].public_state == "serving", 2 * RETURN)
    return swarm


@pytest.mark.parametrize("settings", [{}, {"begin_anew": True}])
def test_a_stage_is_begun_anew_after_the_wait_or_by_order_and_yields_to_the_older_lineage(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    async def main() -> None:
        swarm = await begun_anew(tmp_path, **settings)
        [anew] = events_of(swarm, "begun-anew")
        assert anew["beginning"] == 1
        assert bool(events_of(swarm, "waiting-for-stage", 7)) != bool(settings)
        await everyone_goes_on(swarm, 20)
        assert step_of(swarm.nodes[7]) < 40
        swarm.add(C, stage=0)
        await until(lambda: bool(events_of(swarm, "yielded", 7)))
        await everyone_goes_on(swarm, 20)
        assert {lineage.beginning for lineage in lineages(swarm, 0)} == {0}
        assert step_of(swarm.nodes[7]) >= 40
        assert not [
            e for e in events_of(swarm, "round") if e["node"] == 7 and e["partner"] and e["round"] < 8
        ]
        await everyone_goes_on(swarm, 60)
        assert swarm.nodes[7].context.counters.partners.total  # now they average
        await swarm.leave()

    run_swarm(main())


def test_a_replica_that_was_begun_anew_goes_on_from_its_own_state_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await begun_anew(tmp_path, begin_anew=True)
        await everyone_goes_on(swarm, 20)
        await leave(swarm, 7)
        swarm.add(7, stage=0, begin_anew=True)  # as a service that was started so starts it again
        await everyone_goes_on(swarm, 20)
        assert len(events_of(swarm, "begun-anew")) == 1
        await swarm.leave()

    run_swarm(main())


def test_everything_closed_and_started_in_the_other_order_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        at = {number: step_of(node) for number, node in swarm.nodes.items()}
        for number in (A, B, C):
            await leave(swarm, number)
        await asyncio.sleep(9 * 3600)
        for number, stage in ((C, 0), (A, 0), (B, 1)):
            swarm.add(number, stage=stage)
            await asyncio.sleep(10)
        await everyone_goes_on(swarm)
        assert all(step_of(swarm.nodes[number]) >= at[number] for number in at)
        assert not events_of(swarm, "begun-anew")
        await swarm.leave()

    run_swarm(main())


def test_one_that_leaves_right_after_the_other_is_told_that_it_is_the_last(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, step=10)
        await leave(swarm, A)
        await leave(swarm, C)
        assert [e["stage"] for e in events_of(swarm, "last-replica", C)] == [0]
        assert not events_of(swarm, "last-replica", A)
        await swarm.leave()

    run_swarm(main())
