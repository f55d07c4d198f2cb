"""Peers move from the richest stage to the poorest, no more of them than needed, and never leave one empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bootstrap.simulated_swarm import SimulatedSwarm
from node.model.compute import Priority
from node.model.stage import work_of
from node.places.abilities import Abilities
from node.places.moving import Mover
from node.places.rebalance import Move, Peer, best_move
from node.state.transfer import download_state
from protocol.errors import JoinError, Refused, ResourceError
from protocol.messages import GetStatePiece, StatePiece
from protocol.rpc import Traffic
from protocol.transport.base import PeerId
from tests.swarm.micro import (
    FOREVER,
    events_of,
    guest_of,
    micro_manifest,
    micro_swarm,
    numbers_of_stage,
    peer_of,
    run_swarm,
    stage_nodes,
    step_of,
    until,
)

LIFETIME = 60.0  # of records: a minute, as in runs over the internet
MICROBATCH_SECONDS = 10.0  # so slow that an hour is a few thousand microbatches; the ratios are what counts
SLOW: dict[str, Any] = {
    "inner__microbatches": 4,
    "inner__total_steps": FOREVER,
    "model__intermediate_size": 512,  # next to such layers the last stage's head is a sixth more work
    "limits__record_lifetime": LIFETIME,
    "limits__microbatch_deadline": 120.0,
    "limits__gossip_deadline": 240.0,
}


def slow_swarm(stages: int, **changes: Any) -> SimulatedSwarm:
    """Each stage takes the time that its multiplications ask for, the last one in a single piece of work."""
    swarm: SimulatedSwarm = micro_swarm(stages=stages, model__layers=stages, **SLOW, **changes)
    shares = relative_work(stages)

    def seconds(stage: int, priority: Priority) -> float:
        is_last = stage == stages - 1
        forward = MICROBATCH_SECONDS * shares[stage] * (1 if is_last else 1 / 3)
        backward = MICROBATCH_SECONDS * shares[stage] * 2 / 3
        return {Priority.FORWARD: forward, Priority.BACKWARD: backward}.get(priority, 0.01)

    swarm.seconds = seconds
    return swarm


@cache
def relative_work(stages: int) -> list[float]:
    manifest = micro_manifest(stages=stages, model__layers=stages, **SLOW)
    work = [work_of(manifest, stage) for stage in range(manifest.stages)]
    return [amount / min(work) for amount in work]


async def settled(stages: int, replicas: int, **changes: Any) -> SimulatedSwarm:
    """A swarm whose nodes chose their stages themselves and have trained for a while."""
    swarm = slow_swarm(stages, **changes)
    await swarm.seed_peer.start()
    for number in range(stages * replicas):
        swarm.add(number)
        await asyncio.sleep(4)  # so that each sees where those before it are
    await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()), step=1.0)
    assert [len(stage_nodes(swarm, stage)) for stage in range(stages)] == [replicas] * stages
    await asyncio.sleep(6 * LIFETIME)
    assert not events_of(swarm, "moving")
    return swarm


def capacities(swarm: SimulatedSwarm) -> list[float]:
    """Replicas of each stage over what a microbatch costs there: its microbatches per `MICROBATCH_SECONDS`."""
    shares = relative_work(swarm.manifest.stages)
    serving = [node for node in swarm.nodes.values() if node.public_state == "serving"]
    return [sum(node.context.stage == s for node in serving) / share for s, share in enumerate(shares)]


def best_throughput(swarm: SimulatedSwarm) -> float:
    """Of all ways to spread as many equal peers over the stages."""
    shares = relative_work(swarm.manifest.stages)
    counts = [0] * len(shares)
    for _ in swarm.nodes:  # each to where it is needed most: the best for equal peers
        poorest = min(range(len(shares)), key=lambda stage: counts[stage] / shares[stage])
        counts[poorest] += 1
    return min(count / share for count, share in zip(counts, shares, strict=True))


async def microbatches_in(swarm: SimulatedSwarm, seconds: float) -> float:
    """How many the first stage has trained in so many seconds, while nobody moves."""
    first = stage_nodes(swarm, 0)
    before = sum(node.context.counters.received for node in first)
    await asyncio.sleep(seconds)
    return sum(node.context.counters.received for node in first) - before


def kill_half(swarm: SimulatedSwarm, stage: int) -> int:
    numbers = numbers_of_stage(swarm, stage)
    for number in numbers[: len(numbers) // 2]:
        swarm.kill(number)
    return len(numbers) // 2


async def all_train_on(swarm: SimulatedSwarm) -> None:
    goals = {number: step_of(node) + 3 for number, node in swarm.nodes.items()}
    await until(
        lambda: all(step_of(swarm.nodes[n]) >= goal for n, goal in goals.items()), seconds=1200, step=1.0
    )


async def at_rest(swarm: SimulatedSwarm) -> None:
    """Until nobody has moved for ten record lifetimes."""
    while True:
        moves = len(events_of(swarm, "moving"))
        await asyncio.sleep(10 * LIFETIME)
        if len(events_of(swarm, "moving")) == moves:
            return


@pytest.mark.timeout(600)  # half a minute of computing, on a machine that may have other things to do
@pytest.mark.parametrize(("stages", "replicas", "needed"), [(4, 4, 1), (3, 8, 2)])
def test_half_of_a_stage_dies_and_the_swarm_is_near_its_best_again(
    stages: int, replicas: int, needed: int
) -> None:
    async def main() -> None:
        swarm = await settled(stages, replicas)
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
            real = time.perf_counter()
            after = await microbatches_in(swarm, 3600.0)
            print(
                f"an hour: {time.perf_counter() - real:.1f} s real, {after:.0f} microbatches, {whole:.0f} before"
            )
            assert after >= 0.6 * whole  # it has 14 of 16 replicas, and 3 instead of 4 in two stages
            assert len(events_of(swarm, "moving")) == len(moves)
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


async def one_moves(swarm: SimulatedSwarm) -> dict[str, Any]:
    """Until the next move begins; returns its event."""
    before = len(events_of(swarm, "moving"))
    await until(lambda: len(events_of(swarm, "moving")) > before, seconds=3600, step=1.0)
    return events_of(swarm, "moving")[before]


async def somebody_moved(swarm: SimulatedSwarm) -> None:
    await until(lambda: bool(events_of(swarm, "moved")), seconds=3600, step=1.0)


async def never_empty(swarm: SimulatedSwarm) -> None:
    """Raises when a stage has no serving replica, at any moment."""
    while True:
        assert min(capacities(swarm)) > 0
        await asyncio.sleep(0.5)


@pytest.mark.timeout(300)
def test_a_mover_that_dies_on_its_way_is_replaced_by_another() -> None:
    async def main() -> None:
        swarm = await settled(3, 4)
        kill_half(swarm, 1)
        watch = asyncio.get_running_loop().create_task(never_empty(swarm))
        number = (await one_moves(swarm))["node"]
        mover = swarm.nodes[number]
        await until(lambda: mover.context.stage == 1 and mover.public_state == "joining", 300, 0.01)
        swarm.kill(number)
        assert not events_of(swarm, "moved")
        await somebody_moved(swarm)
        await at_rest(swarm)
        assert len(events_of(swarm, "moved")) == 1
        assert min(capacities(swarm)) >= 0.8 * best_throughput(swarm)
        await all_train_on(swarm)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert watch.cancelled()
        await swarm.leave()

    run_swarm(main())


@pytest.mark.timeout(300)
def test_of_several_that_would_move_at_the_same_moment_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica of the richest stage takes itself for the one to go, and none sees that another has begun."""
    asker: ContextVar[PeerId] = ContextVar("asker")
    has_claimed: ContextVar[bool] = ContextVar("has_claimed", default=False)
    look, take_lease, read_claims = Mover._look, Mover._take_lease, Mover._claims
    claims = list[PeerId]()

    async def marked_look(self: Mover, *args: Any) -> int | None:
        asker.set(self._transport.peer_id)
        return await look(self, *args)

    async def counted(self: Mover, *args: Any) -> bool:
        claims.append(self._transport.peer_id)
        token = has_claimed.set(True)
        try:
            return await take_lease(self, *args)
        finally:
            has_claimed.reset(token)

    async def unseen(self: Mover) -> Any:
        return await read_claims(self) if has_claimed.get() else []

    def selfish(peers: Sequence[Peer], *args: Any, **named: Any) -> Move | None:
        move, mine = best_move(peers, *args, **named), [p for p in peers if p.peer == asker.get()]
        if move is not None and mine and mine[0].stage == move.source:
            return replace(move, peer=asker.get())
        return move

    monkeypatch.setattr(Mover, "_look", marked_look)
    monkeypatch.setattr(Mover, "_take_lease", counted)
    monkeypatch.setattr(Mover, "_claims", unseen)
    monkeypatch.setattr("node.places.moving.best_move", selfish)
    monkeypatch.setattr("node.places.moving.PAUSES", (0.5, 0.5))

    async def main() -> None:
        swarm = await settled(2, 4)
        kill_half(swarm, 1)
        await somebody_moved(swarm)
        await at_rest(swarm)
        assert len(set(claims)) > 1
        assert [(m["source"], m["target"]) for m in events_of(swarm, "moved")] == [(0, 1)]
        await swarm.leave()

    run_swarm(main())


@pytest.mark.timeout(300)
def test_a_stage_that_died_out_is_begun_again_by_one_of_the_others() -> None:
    async def main() -> None:
        swarm = await settled(2, 4)
        for number in numbers_of_stage(swarm, 1):
            swarm.kill(number)
        await somebody_moved(swarm)
        assert events_of(swarm, "initialised", node=events_of(swarm, "moved")[0]["node"])
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.timeout(300)
def test_a_move_is_in_the_checkpoint_and_the_state_is_that_of_the_new_stage(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await settled(2, 4, directory=tmp_path)
        kill_half(swarm, 1)
        number = (await one_moves(swarm))["node"]
        mover = swarm.nodes[number]
        await somebody_moved(swarm)
        await asyncio.sleep(1)
        assert mover.surroundings.state is not None
        saved = mover.surroundings.state.checkpoint(mover.signed.run_id)
        assert saved is not None
        assert saved.stage == 1
        downloaded = events_of(swarm, "downloaded", node=number)[-1]
        assert saved.state.step >= downloaded["step"] > 0
        other = next(node for node in stage_nodes(swarm, 1) if node is not mover)
        assert saved.state.phi.numel() == other.replica.parameters
        assert saved.state.second_moment.any()
        guest = await guest_of(swarm)
        old_stage = GetStatePiece(stage=0, index=0, moments=False)
        with pytest.raises(Refused, match="other-stage"):
            await guest.call(peer_of(mover), Traffic.STATE, old_stage, StatePiece, deadline=5.0)
        await until(lambda: bool(mover.context.counters.partners), seconds=3600, step=1.0)
        swarm.kill(number)
        await asyncio.sleep(LIFETIME)
        returned = swarm.add(number)
        await until(lambda: returned.public_state == "serving", step=1.0)
        assert returned.context.stage == 1
        assert peer_of(returned) == peer_of(mover)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.timeout(300)
def test_a_download_that_fails_sends_the_mover_back_to_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 3

    async def flaky(*args: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise JoinError("The donors are gone.")
        return await download_state(*args)

    async def main() -> None:
        swarm = await settled(2, 4)
        kill_half(swarm, 1)
        monkeypatch.setattr("node.trainer.download_state", flaky)
        number = (await one_moves(swarm))["node"]
        await somebody_moved(swarm)
        assert failures < 0
        assert [event["stage"] for event in events_of(swarm, "move-failed")] == [1]
        assert events_of(swarm, "chose-stage", node=number)[-1]["stage"] == 1
        await at_rest(swarm)
        assert [len(stage_nodes(swarm, stage)) for stage in (0, 1)] == [3, 3]
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.timeout(300)
def test_a_node_for_which_the_stage_is_too_large_stays_and_another_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require, too_small = Abilities.require, list[Abilities]()

    def of_the_first(self: Abilities, stage: int, freed: int = 0) -> None:
        if freed and not too_small:
            too_small.append(self)
        if freed and self in too_small:
            raise ResourceError("Stage 1 needs 900 GiB of memory.")
        require(self, stage, freed)

    async def main() -> None:
        swarm = await settled(2, 4)
        kill_half(swarm, 1)
        monkeypatch.setattr(Abilities, "require", of_the_first)
        await somebody_moved(swarm)
        [stays], [moved] = events_of(swarm, "stays"), events_of(swarm, "moved")
        assert stays["node"] != moved["node"]
        assert swarm.nodes[stays["node"]].context.stage == 0
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


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


@pytest.mark.timeout(300)
def test_ctrl_c_on_the_way_to_another_stage_leaves_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await settled(2, 4, directory=tmp_path)
        kill_half(swarm, 1)
        for node in swarm.nodes.values():
            await node.checkpoints.save()
        number = (await one_moves(swarm))["node"]
        mover = swarm.nodes[number]
        await until(lambda: mover.context.stage == 1 and mover.public_state == "joining", 300, 0.01)
        mover.stop()
        await asyncio.wait_for(asyncio.shield(swarm.tasks[number]), 30)
        assert mover.surroundings.state is not None
        saved = mover.surroundings.state.checkpoint(mover.signed.run_id)
        assert saved is not None
        assert (saved.stage, saved.state.step > 0) == (0, True)  # what was whole, not what was half there
        await swarm.leave()

    run_swarm(main())
