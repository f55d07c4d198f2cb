"""A text that a reader of the page asks for: one at a time, and one in ten seconds for all readers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from bootstrap.dashboard import asking
from bootstrap.dashboard.asking import (
    ANSWER_SECONDS,
    PAUSE_SECONDS,
    SECRET_HEADER,
    Prompts,
    asked_by_own_page,
    user_at,
)
from bootstrap.dashboard.board import Sample
from protocol.errors import JoinError, PeerUnreachable


class Writing:
    """Stands for a run that takes `seconds` for a text, or fails. Mutable: the prompts, and the samples shown."""

    def __init__(self, seconds: float = 1.0, failure: Exception | None = None) -> None:
        self.seconds, self.failure = seconds, failure
        self.asked: list[str] = []
        self.shown: list[Sample] = []
        self.prompts = Prompts(self._write, self.shown.append)

    async def _write(self, prompt: str) -> Sample:
        self.asked.append(prompt)
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        return Sample(0.0, 1, 1, None, f"{prompt} more")

    async def refused(self, prompt: str = "The") -> tuple[int, str]:
        with pytest.raises(HTTPException) as refusal:
            await self.prompts.answer(prompt)
        return refusal.value.status_code, refusal.value.detail


async def test_readers_wait_for_each_other_and_ten_seconds() -> None:
    run = Writing(seconds=12.0)
    first = asyncio.create_task(run.prompts.answer("The"))
    await asyncio.sleep(PAUSE_SECONDS + 1)  # it is still being written
    assert (await run.refused())[0] == 429
    await first
    await run.prompts.answer("A")
    assert run.asked == ["The", "A"]
    assert [sample.text for sample in run.shown] == ["The more", "A more"]
    quick = Writing()
    await quick.prompts.answer("The")
    status, said = await quick.refused()
    assert (status, "try again in 9 s" in said) == (429, True)
    await asyncio.sleep(PAUSE_SECONDS)
    await quick.prompts.answer("The")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Writing(failure=JoinError("A stage has nobody.")), "A stage has nobody."),
        (Writing(failure=PeerUnreachable("it is gone")), "it is gone"),
        (Writing(seconds=1e6), f"No text came in {ANSWER_SECONDS:.0f} s"),
    ],
)
async def test_a_run_that_does_not_write_is_a_sentence_and_may_be_asked_again(
    run: Writing, said: str
) -> None:
    for _ in range(2):
        status, sentence = await run.refused()
        assert status == 503
        assert said in sentence
        await asyncio.sleep(PAUSE_SECONDS)
    assert len(run.asked) == 2
    assert run.shown == []


@pytest.mark.parametrize("prompt", ["", " \n", "x" * 201])
async def test_no_prompt_and_a_long_one_cost_no_turn(prompt: str) -> None:
    run = Writing()
    assert (await run.refused(prompt))[0] == 400
    await run.prompts.answer("x" * 200)
    assert len(run.asked) == 1


READER, SERVER = ("127.0.0.1", 0xEA58), ("127.0.0.1", 0xE457)
TABLE_LINE = (
    "1: 0100007F:EA58 0100007F:E457 {state} 00000000:00000000 03:0000176F 00000000 {user:>5} 0 {inode} 3 x"
)


@pytest.mark.parametrize(
    ("state", "user", "inode", "found"),
    [("01", 1000, 771206, 1000), ("05", 0, 0, None), ("04", 1000, 0, None)],
    ids=["open", "closed", "closed, with data on their way"],
)
def test_an_end_that_its_process_has_closed_is_not_taken_for_roots(
    state: str, user: int, inode: int, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could otherwise order a node that runs as root: by closing the connection at once."""
    table = tmp_path / "tcp"
    table.write_text("header\n" + TABLE_LINE.format(state=state, user=user, inode=inode) + "\n")
    monkeypatch.setattr(asking, "TABLES", (table, tmp_path / "missing"))
    assert user_at(READER, SERVER) == found


async def test_a_reader_who_goes_away_within_a_request_is_no_failure_of_the_server() -> None:
    parts: list[Message] = [
        {"type": "http.request", "body": b"The", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return parts.pop(0)

    headers = {"host": "127.0.0.1:1", "origin": "http://127.0.0.1:1", SECRET_HEADER: "secret"}
    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    with pytest.raises(HTTPException) as refusal:
        await asked_by_own_page(Request({"type": "http", "headers": listed}, receive), "secret")
    assert refusal.value.status_code == 400
