"""How long answers are waited for: by the asker's own experience, whatever the answerer says."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.pipeline.answer_times import ENOUGH, FEW, REMEMBERED, SOONEST, STALLED, AnswerTimes
from protocol.errors import DeadlineExceeded
from protocol.messages import Progress
from protocol.messages.training import Forward
from protocol.rpc.patience import FRAME_SECONDS, MOST_STALLS, Patience
from protocol.rpc.rpc import Answer, Request, Traffic
from tests.unit.two_peers import forward, in_virtual_time, two_peers

LIMIT = 30.0


def test_before_there_is_an_answer_the_manifest_bounds_what_is_waited() -> None:
    times = AnswerTimes(LIMIT, 2)
    assert times.standstill == STALLED * LIMIT * 2
    assert not times.is_known
    assert times.second_after() == LIMIT * 2
    assert times.at_most() == MOST_STALLS * times.standstill


def test_the_first_answers_are_believed_ten_times_over() -> None:
    times = AnswerTimes(LIMIT, 1)
    times.note(0.1)
    assert times.second_after() == SOONEST
    times.note(60.0)  # it compiled
    assert times.second_after() == FEW * 60.0
    assert times.at_most() > times.second_after()


@given(st.lists(st.floats(0.0, 1e5), min_size=REMEMBERED // 2 - 1, max_size=REMEMBERED // 2 - 1))
def test_less_than_half_of_the_answers_do_not_move_it_far(lies: list[float]) -> None:
    times = AnswerTimes(LIMIT, 1)
    for seconds in [1.0] * (REMEMBERED - len(lies)) + lies:
        times.note(seconds)
    assert times.second_after() == 3.0
    assert times.at_most() == times.standstill


def test_slow_stages_are_given_the_time_that_they_take() -> None:
    times = AnswerTimes(10.0, 1)
    for seconds in [90.0, 180.0, 270.0, 360.0, 180.0][:ENOUGH]:
        times.note(seconds)
    assert 2 * 360.0 < times.second_after() < times.at_most()


@in_virtual_time
async def test_progress_buys_no_time_beyond_what_was_known_beforehand() -> None:
    """Failed before: each growth of `done` bought as much again, a thousand times."""

    async def gets_on(request: Request[Forward]) -> Answer:
        done = 0

        def look() -> Progress:
            nonlocal done
            done += 1
            return Progress(state="onward", done=done)

        request.status.look = look
        await asyncio.sleep(1e6)
        raise AssertionError

    for most, expected in ((None, MOST_STALLS * 10.0), (25.0, 25.0)):
        async with two_peers() as two:
            two.server.handle(Forward.answered_by(gets_on))
            began = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await two.ask(forward(1), Patience(5.0, 10.0, most=most), traffic=Traffic.PIPELINE)
            assert asyncio.get_running_loop().time() - began == pytest.approx(expected, abs=0.1)


@in_virtual_time
async def test_bytes_that_trickle_buy_no_time_beyond_it_either() -> None:
    patience = Patience(5.0, 10.0, most=20.0)
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.sleep(60.0)
    assert patience.due(clock()) == began + 20.0
    assert patience.frame_due(began, clock()) == began + 20.0 + FRAME_SECONDS
