"""What a dashboard collects from real nodes, under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bootstrap.dashboard.board import Board
from bootstrap.dashboard.collector import (
    ASKED_EACH_LOOK,
    FEW,
    LOOK_SECONDS,
    RECORD_SECONDS,
    SOON_SECONDS,
    pause_between_reads,
)
from bootstrap.dashboard.running import watched
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from protocol.messages.peers import GetStats
from tests.made_up_members import MadeUpMember, MadeUpSwarm
from tests.swarm.micro import FOREVER, micro_manifest, observer_of, peer_of, run_swarm, training, until


@asynccontextmanager
async def watched_swarm(replicas: int, **settings: Any) -> AsyncIterator[tuple[SimulatedSwarm, Board]]:
    swarm = await training(replicas, inner__total_steps=FOREVER, **settings)
    async with watched(await observer_of(swarm)) as board:
        await until(lambda: board.now.members == len(swarm.nodes))
        yield swarm, board
    await swarm.leave()


@pytest.mark.long
def test_the_board_shows_who_trains_who_sends_to_whom_and_who_averages_with_whom() -> None:
    async def main() -> None:
        async with watched_swarm(2) as (swarm, board):
            await asyncio.sleep(10)
            stage_of: dict[str, int] = {peer_of(node): node.context.stage for node in swarm.nodes.values()}
            rows = {row["id"]: row for row in board.rows()}
            assert {peer: row["stage"] for peer, row in rows.items()} == stage_of
            for peer, row in rows.items():
                assert row["silent"] is None
                assert set(row["to"]) <= {
                    other for other, stage in stage_of.items() if stage == row["stage"] + 1
                }
                assert not row["partner"] or stage_of[row["partner"]] == stage_of[peer]
            assert any(row["to"] for row in rows.values())
            assert any(row["partner"] for row in rows.values())
            assert board.now.loss is not None
            assert board.now.rate > 0
            await asyncio.sleep(2)
            assert board.now.tokens >= sum(row["tokens"] for row in rows.values() if row["stage"] == 0) > 0

    run_swarm(main())


@pytest.mark.long
def test_a_killed_node_is_seen_within_fifteen_seconds_and_gone_once_its_record_is_over() -> None:
    async def main() -> None:
        async with watched_swarm(2) as (swarm, board):
            killed = peer_of(swarm.nodes[1])
            swarm.kill(1)
            await until(
                lambda: any(row["id"] == killed and row["silent"] for row in board.rows()), seconds=15
            )
            await until(lambda: all(row["id"] != killed for row in board.rows()), seconds=30)
            kinds = [h.kind for h in board.change_since(0)["happenings"] if h.peer == killed]
            assert kinds == ["joined", "silent", "left"]

    run_swarm(main())


def test_an_empty_stage_is_an_alarm_and_a_newcomer_takes_it_back() -> None:
    async def main() -> None:
        async with watched_swarm(1) as (swarm, board):
            swarm.kill(1)
            await until(
                lambda: any(r.level == "alarm" and "stage 1" in r.text for r in board.remarks), seconds=15
            )
            swarm.add(2, stage=1)
            await until(lambda: all(r.level != "alarm" for r in board.remarks), seconds=60)
            assert any(h.kind == "joined" and h.stage == 1 for h in board.change_since(0)["happenings"][-2:])

    run_swarm(main())


def test_a_node_that_joins_is_not_said_to_be_silent() -> None:
    async def main() -> None:
        async with watched_swarm(1, link=Link(latency=0.2)) as (swarm, board):
            swarm.add(2, stage=1)
            await until(lambda: board.now.members == 3)
            assert not [h for h in board.change_since(0)["happenings"] if h.kind in ("silent", "back")]

    run_swarm(main())


@pytest.mark.parametrize("answers", [True, False])
def test_who_joins_has_a_row_soon_after_its_record_whether_it_answers_or_not(answers: bool) -> None:
    """Three seconds until records are read, and their search: four of the five that a person is promised."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        swarm = MadeUpSwarm(micro_manifest(limits__record_lifetime=600.0), loop.time, age=100.0)
        await swarm.start(6)
        async with watched(await swarm.observer()) as board:
            await until(lambda: board.now.members == 6)
            for number in range(6, 16):
                await asyncio.sleep(7.0 + 0.173 * number)  # at another moment between two looks each time
                member = await _joined(swarm, number, answers)
                announced = loop.time()
                await until(lambda peer=member.peer: any(row["id"] == peer for row in board.rows()), 4.0)
                assert loop.time() - announced < SOON_SECONDS + 0.5
                if answers:
                    await until(
                        lambda peer=member.peer: any(
                            row["id"] == peer and row["tokens"] for row in board.rows()
                        ),
                        1.0,
                    )

    run_swarm(main())


async def _joined(swarm: MadeUpSwarm, number: int, answers: bool) -> MadeUpMember:
    """A new member whose record has just been put; one that does not answer is still joining."""
    member = MadeUpMember(swarm, number)
    if not answers:
        member.state = "joining"
    await member.start()
    if not answers:
        member.rpc.stop_handling(GetStats)
    swarm.members.append(member)
    return member


def test_records_of_many_members_are_read_as_seldom_as_ever() -> None:
    assert pause_between_reads(0, 60.0) == LOOK_SECONDS
    assert pause_between_reads(FEW, 60.0) == SOON_SECONDS
    assert pause_between_reads(1_000, 60.0) == pause_between_reads(FEW + 1, 60.0) == RECORD_SECONDS
    assert pause_between_reads(1_000, 6.0) == 2.0


@pytest.mark.long
def test_one_who_comes_late_sees_the_curves_from_before() -> None:
    async def main() -> None:
        async with watched_swarm(2) as (swarm, early):
            await asyncio.sleep(120)
            began = swarm.network.now(swarm.seed_peer.transport.peer_id)
            async with watched(await observer_of(swarm, "latecomer")) as late:
                await until(lambda: len(late.change_since(0)["points"]) > 100)
                points = late.change_since(0)["points"]
        assert points == sorted(points)
        before = [point for point in points if point.time < began]
        assert before[0].time < began - 90
        assert before[-1].loss is not None
        assert [point.tokens for point in points] == sorted(point.tokens for point in points)
        seen = early.change_since(0)["points"]
        compared = 0
        for point in before:
            same = min(seen, key=lambda other: abs(other.time - point.time))
            if abs(same.time - point.time) < 1.0 and point.time > before[0].time + 20:
                compared += 1
                assert point.tokens == pytest.approx(same.tokens, rel=0.15)
        assert compared > 20

    run_swarm(main())


@pytest.mark.long
def test_of_more_members_than_can_be_asked_at_once_the_dead_are_still_found_soon() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        swarm = MadeUpSwarm(micro_manifest(limits__record_lifetime=600.0), loop.time, age=100.0)
        await swarm.start(3 * ASKED_EACH_LOOK)
        async with watched(await swarm.observer()) as board:
            await until(lambda: board.now.members == len(swarm.members))
            await asyncio.sleep(10)
            for member in swarm.members[:: len(swarm.members) // 12]:
                await member.kill()
            dead = 3 * ASKED_EACH_LOOK - len(swarm.members)
            # each is asked every three looks; whoever did not answer is asked again at the next one
            await until(
                lambda: sum(bool(row["silent"]) for row in board.rows()) == dead, seconds=5.5 * LOOK_SECONDS
            )
            assert dead >= 12

    run_swarm(main())
