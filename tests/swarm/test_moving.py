"""Peers move from the richest stage to the poorest, no more of them than needed, and never leave one empty."""

from __future__ import annotations

import asyncio

import pytest

from tests.swarm.micro import events_of, numbers_of_stage, run_swarm, stage_nodes, until
from tests.swarm.movers import (
    LIFETIME,
    all_train_on,
    at_rest,
    best_throughput,
    capacities,
    kill_half,
    microbatches_in,
    settled,
    slow_swarm,
    somebody_moved,
)


@pytest.mark.long
@pytest.mark.timeout(600)  # half a minute of computing, on a machine that may have other things to do
@pytest.mark.parametrize(("stages", "replicas", "needed"), [(4, 4, 1), (3, 8, 2)])
def test_half_of_a_stage_dies_and_the_swarm_is_near_its_best_again(
    stages: int, replicas: int, needed: int
) -> None:
    async def main() -> None:
        swarm = await settled(stages, replicas, lifetimes=6)
        whole = 2 * await microbatches_in(swarm, 1800.0) if stages == 4 else 0.0
        kill_half(swarm, 1)
        before = min(capacities(swarm))
        began = swarm.network.now()
        await until(lambda: bool(events_of(swarm, "moved")), seconds=3600, step=5.0)
        await at_rest(swarm)
        moves = events_of(swarm, "moved")
        print(
            f"{stages} x {replicas}: {before:.2f} -> {min(capacities(swarm)):.2f} of {best_throughput(swarm):.2f}, "
            f"moves {[(m['source'], m['target'], round(m['time'] - began)) for m in moves]}"
        )
        assert all(move["target"] == 1 for move in moves)
        assert needed <= len(moves) <= needed + 2
        assert min(capacities(swarm)) >= 0.8 * best_throughput(swarm)
        if stages == 4:
            after = await microbatches_in(swarm, 3600.0)
            print(f"an hour: {after:.0f} microbatches, {whole:.0f} before")
            assert after >= 0.6 * whole  # it has 14 of 16 replicas, and 3 instead of 4 in two stages
            assert len(events_of(swarm, "moving")) == len(moves)
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_stage_that_died_out_is_begun_again_by_one_of_the_others() -> None:
    async def main() -> None:
        swarm = await settled(2, 3)
        for number in numbers_of_stage(swarm, 1):
            swarm.kill(number)
        await somebody_moved(swarm)
        mover = events_of(swarm, "moved")[0]["node"]
        assert events_of(swarm, "initialised", mover) or events_of(swarm, "begun-anew", mover)
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_whose_stage_or_place_the_volunteer_chose_do_not_move() -> None:
    async def main() -> None:
        swarm = slow_swarm(2)
        await swarm.seed_peer.start()
        for number in range(7):
            swarm.add(number, stage=number % 2)
        await asyncio.sleep(LIFETIME)
        swarm.add(7, moves=False)  # comes to stage 1, which has one less
        await asyncio.sleep(5 * LIFETIME)
        assert [len(stage_nodes(swarm, stage)) for stage in (0, 1)] == [4, 4]
        for number in (1, 3):
            swarm.kill(number)
        await asyncio.sleep(15 * LIFETIME)
        assert not events_of(swarm, "moving")
        await swarm.leave()

    run_swarm(main())
