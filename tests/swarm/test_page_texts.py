"""Texts by the present weights, and who gave how much, as a page shows them, under the virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bootstrap.dashboard.board import MOST_SAMPLES, Board, Sample
from bootstrap.dashboard.collector import Audience
from bootstrap.dashboard.running import watched
from bootstrap.dashboard.sampling import (
    MOST_ASKED,
    MOST_CHARACTERS,
    MOST_GIVERS,
    PROMPT,
    SECONDS,
    Texts,
    givers_of,
    harmless,
)
from bootstrap.inspect.observer import Observer
from node.watch.words import LONGEST_NAME
from protocol.codecs.codec import encode
from protocol.errors import JoinError, Refused
from protocol.messages.peers import GetReceipts, ReceiptList
from protocol.messages.training import Predict, Predicted
from protocol.records.announcement import State
from protocol.records.receipts import Contribution, signed_receipt
from protocol.rpc.rpc import Answer, Request
from tests.made_up_members import MadeUpMember, MadeUpSwarm
from tests.swarm.micro import FOREVER, micro_manifest, observer_of, peer_of, run_swarm, training, until

MINUTES = 3


def samples_of(board: Board) -> list[Sample]:
    return board.change_since(0)["samples"]


@pytest.mark.long
def test_real_weights_write_a_text_and_real_receipts_are_added_up() -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        audience = Audience()
        async with watched(await observer_of(swarm), audience, by_people=True) as board:
            await until(lambda: board.now.loss is not None)
            with audience.watching():
                await until(lambda: bool(samples_of(board) and board.change_since(0)["givers"]), 20.0)
            [sample], givers = samples_of(board), board.change_since(0)["givers"]
            assert sample.text.startswith(PROMPT)
            assert sample.text != PROMPT
            assert sample.step > 0
            assert sample.loss is not None
            assert givers
            assert {giver.peer for giver in givers} <= {peer_of(node) for node in swarm.nodes.values()}
            assert sum(giver.share for giver in givers) == pytest.approx(1.0)
        await swarm.leave()

    run_swarm(main())


@dataclass
class Writers:
    """Made-up members and their board. Mutable: how often a text was begun, and how often receipts were asked for."""

    swarm: MadeUpSwarm
    observer: Observer
    board: Board
    begun: int = 0
    receipts: int = 0


Tensors = Callable[[int], list[torch.Tensor]]  # of an answer, by the tokens before it


@asynccontextmanager
async def writers(
    answer: Tensors,
    audience: Audience | None = None,
    members: int = 4,
    state: State = "serving",
    name: str = "",
) -> AsyncIterator[Writers]:
    """Members whose first stage answers all alone; each has signed for the one before it, which is called `name`."""
    swarm = MadeUpSwarm(micro_manifest(limits__record_lifetime=600.0), asyncio.get_running_loop().time, 100.0)
    await swarm.seed.start()

    async def predict(request: Request[Predict]) -> Answer[Predicted]:
        found.begun += request.message.position == 0
        tensors = answer(request.message.position + request.tensors()[0].shape[1])
        encoded = [encode(t, "fp32" if t.is_floating_point() else "int32") for t in tensors]
        return Answer(Predicted(rounds=[3, 3]), encoded)

    def signing(member: MadeUpMember) -> Callable[[Request[GetReceipts]], Awaitable[Answer[ReceiptList]]]:
        async def receipts(request: Request[GetReceipts]) -> Answer[ReceiptList]:
            found.receipts += 1
            worker = swarm.members[member.number - 1].peer
            work, sign = (1_000 + member.number, 2), member.transport.sign
            return Answer(
                ReceiptList(receipts=[signed_receipt(swarm.run_id, worker, member.peer, work, name, sign)])
            )

        return receipts

    for number in range(members):
        member = MadeUpMember(swarm, number)
        member.state = state
        await member.start()
        member.rpc.handle(Predict.answered_by(predict), GetReceipts.answered_by(signing(member)))
        swarm.members.append(member)
    observer = await swarm.observer()
    async with watched(observer, audience, by_people=True) as board:
        found = Writers(swarm, observer, board)
        yield found


def saying(text: bytes) -> Tensors:
    """The only likely token is the next byte of a text that follows the prompt; at its end, the end of a text."""

    def answer(before: int) -> list[torch.Tensor]:
        byte = (text + b"\0")[before - len(PROMPT)]
        return [torch.zeros(1), torch.tensor([byte], dtype=torch.int32)]

    return answer


WORDS = saying(b"words")


def test_whoever_leaves_and_comes_back_gets_texts_again_and_nobody_is_asked_meanwhile() -> None:
    async def main() -> None:
        audience = Audience()
        async with writers(WORDS, audience) as found:
            await asyncio.sleep(1.5 * SECONDS)
            assert (found.begun, found.receipts) == (0, 0)
            for _ in range(2):
                before = found.begun
                with audience.watching():
                    await asyncio.sleep(10.0)
                    assert samples_of(found.board)[-1].text == f"{PROMPT}words"
                    await asyncio.sleep(1.5 * SECONDS)
                assert found.begun == before + 2
                assert found.receipts == found.begun * len(found.swarm.members)
                await asyncio.sleep(1.5 * SECONDS)
                assert found.begun == before + 2
            sample = samples_of(found.board)[-1]
            assert sample.round == 3
            assert sample.step > 0
            assert sample.loss is not None

    run_swarm(main())


def test_words_of_a_reader_are_gone_on_with_and_where_nobody_can_a_sentence_says_so() -> None:
    async def main() -> None:
        async with writers(WORDS, Audience()) as found:
            texts = Texts(found.observer, found.board, Audience())
            with pytest.raises(JoinError, match="a stage has nobody that answers"):
                await texts.write("Abc ")
            await until(lambda: found.board.now.members == 4)
            assert (await texts.write("Abc ")).text == "Abc words"
            assert not samples_of(found.board)

    run_swarm(main())


def test_of_a_run_that_is_complete_texts_are_shown_too() -> None:
    async def main() -> None:
        async with writers(WORDS, state="finished") as found:
            await asyncio.sleep(10.0)
            assert [sample.text for sample in samples_of(found.board)] == [f"{PROMPT}words"]

    run_swarm(main())


def test_a_hostile_text_and_a_hostile_name_come_out_bounded_and_as_text() -> None:
    async def main() -> None:
        hostile = b"<script>\x1b[2J\xff\xe2\x80"
        async with writers(saying(hostile), name="<b>\x1b]0;a\n\x07\u202ename") as found:
            await asyncio.sleep(10.0)
            [sample] = samples_of(found.board)
            assert sample.text.startswith(f"{PROMPT}<script>")
            assert "\N{REPLACEMENT CHARACTER}" in sample.text
            assert sample.text.isprintable()
            assert len(sample.text) <= MOST_CHARACTERS
            givers = found.board.change_since(0)["givers"]
            assert givers
            for giver in givers:
                assert giver.name.startswith("<b>")
                assert giver.name.isprintable()
                assert len(giver.name) <= LONGEST_NAME
            json.dumps(found.board.change_since(0), allow_nan=False)

    run_swarm(main())


NONSENSE: dict[str, Tensors] = {
    "NaN": lambda _: [torch.full((256,), torch.nan)],
    "infinite": lambda _: [torch.full((256,), torch.inf)],
    "impossible": lambda _: [torch.full((256,), -torch.inf)],
    "too large": lambda _: [torch.full((256,), 3.4e38)],
    "too small": lambda _: [torch.full((256,), -3.4e38)],
    "no logits": lambda _: [torch.zeros(0), torch.zeros(0, dtype=torch.int32)],
    "another vocabulary": lambda _: [torch.zeros(255)],
    "nothing": lambda _: [],
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_a_route_that_answers_nonsense_leaves_no_trace_and_is_asked_again_a_minute_later(
    answer: Tensors,
) -> None:
    """`run_swarm` fails on errors in the log."""

    async def main() -> None:
        async with writers(answer) as found:
            await until(lambda: found.board.now.members == 4)
            said = [remark.level for remark in found.board.remarks]
            await asyncio.sleep(4.5 * SECONDS)
            assert not samples_of(found.board)
            assert [remark.level for remark in found.board.remarks] == said
            assert found.begun == 5

    run_swarm(main())


@pytest.mark.parametrize("refusal", ["refuses", "does not know", "nobody answers"])
def test_members_that_write_and_sign_nothing_leave_no_trace_either(refusal: str) -> None:
    async def main() -> None:
        async with writers(WORDS) as found:
            for member in found.swarm.members:
                for kind in (Predict, GetReceipts):
                    member.rpc.stop_handling(kind)
                    if refusal == "refuses":
                        member.rpc.handle(kind.answered_by(_refuse))
            if refusal == "nobody answers":
                for member in list(found.swarm.members):
                    await member.kill()
            await asyncio.sleep(2.5 * SECONDS)
            assert not samples_of(found.board)
            assert found.board.change_since(0)["givers"] == []

    run_swarm(main())


async def _refuse(request: Request[Any]) -> Answer[Any]:
    raise Refused("private", "this run is for its members")


def test_a_member_that_is_silent_is_asked_for_no_text() -> None:
    async def main() -> None:
        async with writers(WORDS) as found:
            await until(lambda: bool(samples_of(found.board)))
            last = [member for member in found.swarm.members if member.stage == 1]
            for member in last:
                await member.kill()
            await until(lambda: sum(row["silent"] is not None for row in found.board.rows()) == len(last))
            before = found.begun
            await asyncio.sleep(2.5 * SECONDS)  # their records are still there
            assert len(found.board.rows()) == 4
            assert found.begun == before

    run_swarm(main())


def test_of_many_members_some_are_asked_for_receipts_and_the_same_ones_each_time() -> None:
    async def main() -> None:
        audience = Audience()
        async with writers(WORDS, audience, members=MOST_ASKED + 10) as found:
            await until(lambda: found.board.now.members == MOST_ASKED + 10)
            with audience.watching():
                await asyncio.sleep(10.0)
                assert found.receipts == MOST_ASKED
                first = found.board.change_since(0)["givers"]
                await asyncio.sleep(SECONDS)
                assert found.receipts == 2 * MOST_ASKED
                assert found.board.change_since(0)["givers"] == first

    run_swarm(main())


def test_what_strangers_call_themselves_and_write_is_bounded_and_no_escape_sequence() -> None:
    hostile = "<script>\x1b[2J\u202e\0" + "x" * 10_000
    found = [Contribution(f"peer {i}", hostile, 10, 1, 1) for i in range(MOST_GIVERS + 50)]  # type: ignore[arg-type]
    givers = givers_of(found)
    assert len(givers) == MOST_GIVERS
    assert all(len(giver.name) <= LONGEST_NAME and giver.name.isprintable() for giver in givers)
    assert len(harmless(hostile, MOST_CHARACTERS)) == MOST_CHARACTERS
    assert harmless(hostile, MOST_CHARACTERS).isprintable()


def test_a_reader_gets_texts_and_sums_once_and_the_board_keeps_few() -> None:
    board = Board(
        {
            "name": "run",
            "id": "0",
            "private": False,
            "stages": 1,
            "steps": 1,
            "tokens_per_step": 1,
            "inner_steps": 1,
            "band": (0.3, 3.0),
        },
        lambda sightings, now: [],
    )
    for number in range(2 * MOST_SAMPLES):
        board.note_sample(Sample(float(number), number, 0, None, "x"))
    board.note_givers(givers_of([Contribution("peer", "name", 3, 1, 1)]))  # type: ignore[arg-type]
    whole = board.change_since(0)
    assert [sample.step for sample in whole["samples"]] == list(range(MOST_SAMPLES, 2 * MOST_SAMPLES))
    assert whole["givers"] == givers_of([Contribution("peer", "name", 3, 1, 1)])  # type: ignore[arg-type]
    board.note_givers(givers_of([Contribution("peer", "name", 3, 1, 1)]))  # type: ignore[arg-type]
    later = board.change_since(whole["version"])
    assert (later["samples"], later["givers"]) == ([], None)
