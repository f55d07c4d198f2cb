"""Background work has an owner: a failure is told, a part is started again, and nothing outlives its owner."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest

from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.errors import NodeFailed, Refused
from protocol.supervision import LONGEST_PAUSE, Supervisor, all_of, until_event


class Told:
    """What a volunteer would read, and the sentence that the node would end with."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.ends: list[NodeFailed] = []
        self.supervisor = Supervisor(self.tell, self.ends.append)

    def tell(self, sentence: str, event: str, **fields: Any) -> None:
        self.sentences.append(sentence)
        self.events.append({"event": event, **fields})


def test_a_part_that_fails_is_told_and_started_again_with_longer_and_longer_pauses() -> None:
    async def main() -> None:
        told, starts = Told(), list[float]()

        async def work() -> None:
            starts.append(asyncio.get_running_loop().time())
            raise Refused("no", "not today")

        told.supervisor.keep("discovery", work, "Others stop seeing this node.")
        await asyncio.sleep(300)
        pauses = [later - sooner for sooner, later in itertools.pairwise(starts)]
        assert pauses[:4] == [1, 2, 4, 8]
        assert max(pauses) == LONGEST_PAUSE
        assert told.sentences[0] == (
            "Discovery failed (no: not today). Others stop seeing this node. It is started again in 1 s."
        )
        (part,) = told.supervisor.parts()
        assert (part.state, part.restarts, part.failure) == ("failed", len(starts) - 1, "no: not today")
        await told.supervisor.close()
        assert not told.supervisor.parts()

    run_virtual(main())


def test_a_bug_leaves_its_traceback_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        told = Told()

        async def work() -> None:
            raise RuntimeError("no such snapshot")

        told.supervisor.keep("saving checkpoints", work, "Nothing is saved.")
        await asyncio.sleep(20)
        assert "RuntimeError: no such snapshot" in told.sentences[-1]
        await told.supervisor.close()

    run_virtual(main())
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_an_essential_part_ends_the_node_with_a_sentence() -> None:
    async def main() -> None:
        told = Told()

        async def work() -> None:
            raise Refused("broken")

        told.supervisor.group().keep("the network", work, "Nothing can be sent.", essential=True)
        await asyncio.sleep(1)
        assert [str(end) for end in told.ends] == [
            "The network failed (broken). Nothing can be sent. "
            "This node ends; start it again to go on from its last checkpoint."
        ]
        await told.supervisor.close()

    run_virtual(main())


def test_a_part_that_ran_long_before_it_failed_is_started_again_soon() -> None:
    async def main() -> None:
        told, starts = Told(), list[float]()

        async def work() -> None:
            starts.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0 if len(starts) < 5 else 1_000)
            raise Refused("no")

        told.supervisor.keep("probing", work, "")
        await asyncio.sleep(1_100)
        assert starts[5] - starts[4] == 1_001
        await told.supervisor.close()

    run_virtual(main())


def test_what_nobody_awaits_is_told_and_what_somebody_awaits_is_raised_there() -> None:
    async def main() -> None:
        told = Told()

        async def work() -> int:
            raise Refused("no")

        told.supervisor.spawn(work(), "asking again", "The pair is dropped.")
        awaited = told.supervisor.start(work())
        with pytest.raises(Refused):
            await awaited
        await asyncio.sleep(1)
        assert told.sentences == ["Asking again failed (no). The pair is dropped."]
        assert told.supervisor.running() == 0

    run_virtual(main())


def test_closing_ends_all_tasks_of_all_groups_even_one_that_swallows_a_cancellation() -> None:
    async def main() -> None:
        told, ended = Told(), list[str]()

        async def stubborn() -> None:
            try:
                await asyncio.sleep(1_000)
            except asyncio.CancelledError:
                await asyncio.sleep(1_000)

        async def plain() -> None:
            try:
                await asyncio.sleep(1_000)
            finally:
                ended.append("plain")

        told.supervisor.spawn(stubborn(), "stubborn")
        told.supervisor.group().group().keep("plain", plain, "")
        await asyncio.sleep(1)
        assert told.supervisor.running() == 2
        await told.supervisor.close()
        assert (told.supervisor.running(), ended, told.sentences) == (0, ["plain"], [])

    run_virtual(main())


def test_when_one_of_several_fails_none_runs_any_more() -> None:
    async def main() -> None:
        ended = list[str]()

        async def long() -> None:
            try:
                await asyncio.sleep(1_000)
            finally:
                ended.append("long")

        async def failing() -> None:
            await asyncio.sleep(1)
            raise Refused("no")

        with pytest.raises(Refused):
            await all_of(long(), failing())
        assert ended == ["long"]

    run_virtual(main())


def test_work_ends_with_the_event_that_comes_first() -> None:
    async def main() -> None:
        event = asyncio.Event()

        async def answer(seconds: float) -> int:
            await asyncio.sleep(seconds)
            return 7

        assert await until_event(answer(1), event) == 7
        asyncio.get_running_loop().call_later(1, event.set)
        assert await until_event(answer(10), event) is None

    run_virtual(main())


def test_groups_that_came_and_went_leave_nothing_and_can_begin_again() -> None:
    async def main() -> None:
        told = Told()
        group = told.supervisor.group().group()
        for _ in range(3):
            group.keep("probing", lambda: asyncio.sleep(1_000), "")
            assert [part.name for part in told.supervisor.parts()] == ["probing"]
            await group.close()
            assert not told.supervisor.parts()
        group.keep("probing", lambda: asyncio.sleep(1_000), "")
        await told.supervisor.close()
        nothing = "<Supervisor [Tasks: 0 | Parts: 0 kept, 0 failed, 0 restarts | Groups: 0]>"
        assert repr(group) == repr(told.supervisor) == nothing

    run_virtual(main())
