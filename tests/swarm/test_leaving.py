"""Leaving cleanly, and coming back from what was kept on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory import memory_address
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from protocol.errors import JoinError, NolocoError, StateError
from protocol.messages.peers import GetStats, SignReceipt
from protocol.records.announcement import Announcement, stage_key
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_goes_on,
    fails_to_join,
    guest_of,
    micro_manifest,
    micro_swarm,
    peer_of,
    run_swarm,
    stage_nodes,
    step_of,
    training,
    until,
)


def test_a_node_that_leaves_finishes_its_work_withdraws_its_record_and_is_not_missed() -> None:
    async def main() -> None:
        swarm = await training(3, inner__total_steps=FOREVER)
        leaving = swarm.nodes[1]
        leaving.stop()
        await asyncio.wait([swarm.tasks[1]])
        [left] = events_of(swarm, "left", node=1)
        assert left["step"] == leaving.replica.step
        guest = await guest_of(swarm)
        await guest.transport.connect([memory_address(peer_of(swarm.nodes[0]))], 5.0)
        records = await guest.transport.get(stage_key(swarm.nodes[0].context.run_id, 1), 5.0)
        states = {record.subkey: Announcement.read(record).state for record in records}
        assert states[peer_of(leaving)] == "leaving"
        resends = len(events_of(swarm, "resend"))
        await asyncio.sleep(2)
        del swarm.nodes[1]
        await everyone_goes_on(swarm, 20)
        assert len(events_of(swarm, "resend")) <= resends + 3  # those who had not read the record yet
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_node_of_a_later_stage_leaves_when_the_volunteer_s_minutes_are_over(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = micro_swarm(directory=tmp_path, inner__total_steps=FOREVER)
        await swarm.start(1)
        swarm.add(3, stage=1, max_minutes=0.5)
        await until(lambda: bool(events_of(swarm, "serving", node=3)))
        await asyncio.wait([swarm.tasks[3]], timeout=60)
        assert swarm.tasks[3].done()
        swarm.tasks[3].result()
        assert [event["event"] for event in swarm.events if event["node"] == 3][-1] == "left"
        (left,) = events_of(swarm, "left", node=3)
        assert events_of(swarm, "checkpoint", node=3)[-1]["step"] == left["step"] > 0
        del swarm.nodes[3]
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_the_tokens_of_a_node_go_on_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(1, directory=tmp_path, inner__total_steps=FOREVER)
        before = {number: node.context.counters.tokens_stepped for number, node in swarm.nodes.items()}
        for node in swarm.nodes.values():
            await node.checkpoints.save()  # training goes on meanwhile
        assert all(before.values())
        for number in before:
            swarm.kill(number)
        for number in before:
            swarm.add(number)
        await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()))
        for number, node in swarm.nodes.items():
            assert node.context.counters.tokens >= before[number]
        await swarm.leave()

    run_swarm(main())


def test_leaving_does_not_wait_for_a_stage_that_is_gone() -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        swarm.kill(1)
        await asyncio.sleep(5)
        swarm.nodes[0].stop()
        await asyncio.wait_for(asyncio.shield(swarm.tasks[0]), 60)
        assert swarm.tasks[0].exception() is None
        assert events_of(swarm, "left", node=0)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_swarm_that_was_down_comes_back_from_its_directories_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(
            2, step=1, directory=tmp_path, inner__total_steps=FOREVER, outer__inner_steps=10
        )
        await asyncio.sleep(5)
        for node in swarm.nodes.values():
            await node.checkpoints.save()
        before = {n: (peer_of(node), step_of(node)) for n, node in swarm.nodes.items()}
        await asyncio.sleep(2)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await asyncio.sleep(30)
        for number in before:
            swarm.add(number)
        await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()))
        for number, (peer, step) in before.items():
            [restored] = events_of(swarm, "restored", node=number)
            assert peer_of(swarm.nodes[number]) == peer
            assert step - 2 <= restored["step"] <= step
        await everyone_goes_on(swarm)
        assert not events_of(swarm, "downloaded")
        await swarm.leave()

    run_swarm(main())


def test_a_swarm_comes_back_with_nobody_but_its_members(tmp_path: Path) -> None:
    """The seed peer is dead and every member was down: the first one starts alone, the others find it."""

    async def main() -> None:
        swarm = await training(1, directory=tmp_path, inner__total_steps=FOREVER)
        await asyncio.sleep(5)
        for node in swarm.nodes.values():
            await node.checkpoints.save()
        swarm.network.kill(swarm.seed_peer.transport.peer_id)
        for number in (0, 1):
            swarm.kill(number)
        await asyncio.sleep(60)
        swarm.add(0)
        await asyncio.sleep(30)
        assert events_of(swarm, "nobody-reached", node=0)
        swarm.add(1)
        await until(
            lambda: len(swarm.nodes) == 2 and all(hasattr(n, "replica") for n in swarm.nodes.values())
        )
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_node_killed_and_started_again_catches_up(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(2, directory=tmp_path, inner__total_steps=FOREVER)
        await swarm.nodes[1].checkpoints.save()
        swarm.kill(1)
        others = stage_nodes(swarm, 1)
        rounds = others[0].replica.round
        await until(lambda: others[0].replica.round >= rounds + 8, seconds=300)
        await asyncio.sleep(3)  # the other's record tells it by then
        returned = swarm.add(1)
        await until(lambda: returned.public_state == "serving")
        assert events_of(swarm, "checkpoint-old", node=1)
        assert returned.replica.round >= rounds + 8
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_directory_of_another_run_is_not_used(tmp_path: Path) -> None:
    async def founded(seed: int) -> SimulatedSwarm:
        return await training(1, step=1, seed=seed, directory=tmp_path, inner__total_steps=FOREVER)

    async def main() -> None:
        swarm = await founded(1)
        await swarm.leave()
        other: SimulatedSwarm = micro_swarm(seed=2, directory=tmp_path)
        await other.seed_peer.start()
        other.add(0, stage=0)
        error = await fails_to_join(other, 0)
        assert isinstance(error, JoinError | StateError)
        assert "--state-dir" in str(error)
        await other.leave()

    run_swarm(main())


def test_a_finished_node_leaves_the_others_alone() -> None:
    """It stays to serve the model, but proposes to nobody and takes no microbatch that it would not finish."""

    async def main() -> None:
        swarm = micro_swarm(stages=1, inner__total_steps=40)
        await swarm.seed_peer.start()
        swarm.add(0, stage=0, speed=4.0)
        swarm.add(1, stage=0, speed=0.5)
        swarm.add(2, stage=0, speed=0.5)
        await until(lambda: swarm.nodes[0].public_state == "finished")
        fast = swarm.nodes[0]
        await asyncio.sleep(2)
        asked: list[Any] = []
        real = fast.rpc.call

        async def call(*args: Any, **named: Any) -> Any:
            if not isinstance(args[1], SignReceipt):  # for what it did before
                asked.append(args)
            return await real(*args, **named)

        fast.rpc.call = call  # type: ignore[method-assign]
        await swarm.finish()
        assert not asked

    run_swarm(main())


def test_people_can_ask_a_node_how_it_is() -> None:
    async def main() -> None:
        swarm = await training(3, step=20, inner__total_steps=FOREVER)
        guest = await guest_of(swarm)
        node = swarm.nodes[1]
        stats, _ = await guest.call(peer_of(node), GetStats(), deadline=5.0)
        manifest = micro_manifest()
        assert (stats.stage, stats.state) == (1, "serving")
        assert 20 <= stats.step <= node.replica.step
        assert stats.tokens == stats.received * manifest.tokens_per_microbatch
        assert stats.pair_averagings == sum(stats.partners.values()) > 0
        assert stats.tokens_per_second > 0
        assert stats.loss is not None
        await swarm.leave()

    run_swarm(main())


def test_errors_of_a_run_are_ours() -> None:
    """What `SimulatedSwarm.finish` raises is what a volunteer would read."""

    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm()
        await swarm.seed_peer.start()
        swarm.add(0, stage=9)
        with pytest.raises(NolocoError, match="does not exist"):
            await swarm.finish()

    run_swarm(main())
