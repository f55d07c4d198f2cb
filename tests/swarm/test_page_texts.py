"""Texts by the present weights, and who gave how much, as a page shows them, under the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.dashboard.board import MOST_SAMPLES, Board, Sample
from bootstrap.dashboard.collector import Audience
from bootstrap.dashboard.running import watched
from bootstrap.dashboard.sampling import (
    MOST_CHARACTERS,
    MOST_GIVERS,
    NAME_CHARACTERS,
    PROMPT,
    SECONDS,
    givers_of,
    harmless,
)
from protocol.receipts import Contribution
from tests.made_up_members import MadeUpSwarm
from tests.swarm.micro import FOREVER, micro_manifest, observer_of, peer_of, run_swarm, training, until

MINUTES = 3


def samples_of(board: Board) -> list[Sample]:
    return board.change_since(0)["samples"]


@pytest.mark.long
def test_while_somebody_watches_the_weights_write_a_text_a_minute_and_receipts_are_added_up() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        audience = Audience()
        async with watched(await observer_of(swarm), audience, by_people=True) as board:
            await until(lambda: board.now.members == len(swarm.nodes))
            await asyncio.sleep(30.0)
            assert not samples_of(board)
            assert board.change_since(0)["givers"] == []
            with audience.watching():
                await asyncio.sleep(MINUTES * SECONDS)
                assert MINUTES - 1 <= len(samples_of(board)) <= MINUTES + 1
            steps = [sample.step for sample in samples_of(board)]
            assert steps == sorted(set(steps))
            for sample in samples_of(board):
                assert sample.text.startswith(PROMPT)
                assert sample.text != PROMPT
                assert sample.loss is not None
            givers = board.change_since(0)["givers"]
            assert givers
            assert {giver.peer for giver in givers} <= {peer_of(node) for node in swarm.nodes.values()}
            assert sum(giver.share for giver in givers) == pytest.approx(1.0)
            count = len(samples_of(board))
            await asyncio.sleep(2 * SECONDS)
            assert len(samples_of(board)) <= count + 1  # one may have been under way
        await swarm.leave()

    run_swarm(main())


def test_members_that_write_nothing_leave_no_trace_on_the_page() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        swarm = MadeUpSwarm(micro_manifest(limits__record_lifetime=600.0), loop.time, age=100.0)
        await swarm.start(4)
        async with watched(await swarm.observer(), by_people=True) as board:
            await until(lambda: board.now.members == 4)
            said = [remark.level for remark in board.remarks]
            await asyncio.sleep(2 * SECONDS)
            assert not samples_of(board)
            assert board.change_since(0)["givers"] == []
            assert [remark.level for remark in board.remarks] == said

    run_swarm(main())


def test_what_strangers_call_themselves_and_write_is_bounded_and_no_escape_sequence() -> None:
    hostile = "<script>\x1b[2J\u202e\0" + "x" * 10_000
    found = [Contribution(f"peer {i}", hostile, 10, 1, 1) for i in range(MOST_GIVERS + 50)]  # type: ignore[arg-type]
    givers = givers_of(found)
    assert len(givers) == MOST_GIVERS
    assert all(len(giver.name) <= NAME_CHARACTERS and giver.name.isprintable() for giver in givers)
    assert len(harmless(hostile, MOST_CHARACTERS)) == MOST_CHARACTERS
    assert harmless(hostile, MOST_CHARACTERS).isprintable()


def test_a_reader_gets_texts_and_sums_once_and_the_board_keeps_few() -> None:
    board = Board(
        {
            "name": "run",
            "id": "0",
            "stages": 1,
            "steps": 1,
            "tokens_per_step": 1,
            "inner_steps": 1,
            "band": (0.3, 3.0),
        },
        lambda sightings, now: [],
    )
    for number in range(2 * MOST_SAMPLES):
        board.note_sample(Sample(float(number), number, None, "x"))
    board.note_givers(givers_of([Contribution("peer", "name", 3, 1, 1)]))  # type: ignore[arg-type]
    whole = board.change_since(0)
    assert [sample.step for sample in whole["samples"]] == list(range(MOST_SAMPLES, 2 * MOST_SAMPLES))
    assert whole["givers"] == givers_of([Contribution("peer", "name", 3, 1, 1)])  # type: ignore[arg-type]
    board.note_givers(givers_of([Contribution("peer", "name", 3, 1, 1)]))  # type: ignore[arg-type]
    later = board.change_since(whole["version"])
    assert (later["samples"], later["givers"]) == ([], None)
