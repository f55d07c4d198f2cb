"""Work that takes long: the answering side says how far it is, silence ends the wait, and nothing is in vain."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from protocol.codecs.codec import encode
from protocol.errors import DeadlineExceeded, PeerUnreachable, WireError
from protocol.messages import Progress
from protocol.messages.frame import FrameType
from protocol.messages.training import Forward, Gradient, Ready
from protocol.records.identity import Identity
from protocol.rpc.frames import read_frame, write_frame
from protocol.rpc.patience import FRAME_SECONDS, Patience
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from tests.unit.two_peers import Two, after, forward, gradient, idle, in_virtual_time, say_done, two_peers

NARROW = Link(latency=0.01, bandwidth=1e5)  # bytes a second
SILENCE = 5.0


async def work(two: Two, number: int = 1, stall: float = 300.0, **more: object) -> Gradient:
    """Ask for work that is waited for as long as the server is not silent for `SILENCE` seconds."""
    patience = Patience(SILENCE, stall)
    reply, _ = await two.ask(forward(number), patience, traffic=Traffic.PIPELINE, **more)
    assert isinstance(reply, Gradient)
    return reply


@in_virtual_time
async def test_work_that_takes_far_longer_than_the_deadline_is_waited_for() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 90.0)))
        replies = await asyncio.gather(*(work(two, number) for number in range(10)))
        assert [reply.step for reply in replies] == list(range(10))


@in_virtual_time
async def test_a_peer_that_freezes_at_work_is_found_after_the_silence_of_a_deadline() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 90.0)))
        asking = asyncio.create_task(work(two))
        await asyncio.sleep(30)
        two.network.freeze(two.address)
        with pytest.raises(DeadlineExceeded):
            await asking
        assert asyncio.get_running_loop().time() < 30 + SILENCE + 0.1


@in_virtual_time
async def test_who_says_for_ever_that_it_works_and_does_not_get_on_is_given_up() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 1e6)))
        with pytest.raises(DeadlineExceeded):
            await work(two, stall=100.0)
        assert asyncio.get_running_loop().time() == pytest.approx(100.0, abs=0.5)


@in_virtual_time
async def test_work_that_gets_on_may_take_longer_than_any_standstill() -> None:
    async def step_by_step(request: Request) -> Answer:
        for done in range(7):
            request.status.look = lambda done=done: Progress(state="computing", done=done)  # type: ignore[misc]
            await asyncio.sleep(50)
        return Answer(gradient(7))

    async with two_peers() as two:
        two.server.handle(Forward.answered_by(step_by_step))
        assert (await work(two, stall=100.0)).step == 7


class Watched:
    """A handler that takes 60 s, and what became of its requests."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.done: list[int] = []

    async def __call__(self, request: Request) -> Answer:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.append(request.message.stage)
            raise
        self.done.append(request.message.stage)
        return Answer(gradient(request.message.stage))


@in_virtual_time
async def test_what_the_caller_gives_up_is_not_done_and_the_rest_is() -> None:
    async with two_peers() as two:
        watched = Watched()
        two.server.handle(Forward.answered_by(watched))
        given_up, other = (asyncio.create_task(work(two, number)) for number in (1, 2))
        await asyncio.sleep(10)
        given_up.cancel()
        await asyncio.sleep(1)
        assert watched.cancelled == [1]
        assert (await other).step == 2
        assert watched.done == [2]


@in_virtual_time
async def test_what_was_asked_on_a_stream_that_ended_is_not_done() -> None:
    async with two_peers() as two:
        watched = Watched()
        two.server.handle(Forward.answered_by(watched))
        asking = asyncio.create_task(work(two))
        await asyncio.sleep(10)
        two.caller.forget(two.address)
        with pytest.raises(PeerUnreachable):
            await asking
        await asyncio.sleep(2)
        assert watched.cancelled == [1]
        assert "Places: 0 held" in repr(two.server)


@in_virtual_time
async def test_what_is_no_work_is_finished_whoever_waits() -> None:
    async with two_peers() as two:
        watched = Watched()
        two.server.handle(Forward.answered_by(watched, Traffic.GOSSIP))
        with pytest.raises(DeadlineExceeded):
            await two.ask(forward(1), 5.0)
        await asyncio.sleep(60)
        assert watched.done == [1]


@in_virtual_time
async def test_a_request_that_takes_long_to_send_and_an_answer_that_takes_long_to_come_are_no_silence() -> (
    None
):
    """Each is 4 MB on a link that carries 100 kB in a second; the deadline is five seconds."""
    bulk = [encode(torch.zeros(1_000_000), "fp32")]

    async def as_much(request: Request) -> Answer:
        return Answer(gradient(1), bulk)

    async with two_peers(NARROW) as two:
        for rpc in (two.caller, two.server):
            rpc.limit({Traffic.PIPELINE: 8_000_000})
        two.server.handle(Forward.answered_by(as_much))
        await work(two, tensors=bulk)
        assert asyncio.get_running_loop().time() > 80


@in_virtual_time
async def test_a_peer_that_freezes_while_a_request_is_sent_to_it_is_found() -> None:
    async with two_peers(NARROW) as two:
        two.server.limit({Traffic.PIPELINE: 64_000_000})
        two.server.handle(Forward.answered_by(cast("Any", say_done)))
        asking = asyncio.create_task(work(two, tensors=[encode(torch.zeros(8_000_000), "fp32")]))
        await asyncio.sleep(5)
        two.network.freeze(two.address)
        with pytest.raises(DeadlineExceeded):
            await asking
        assert asyncio.get_running_loop().time() < 5 + 60  # what is on its way first fills the stream


@in_virtual_time
async def test_progress_that_is_malformed_counts_against_the_peer_and_ends_the_stream() -> None:
    async def liar(stream: object) -> None:
        frame = await read_frame(stream, 1 << 20)  # type: ignore[arg-type]
        await write_frame(stream, FrameType.PROGRESS, frame.request_id, "progress", {"ahead": -1})  # type: ignore[arg-type]
        await asyncio.sleep(60)

    async with two_peers() as two:
        await two.server.transport.serve(Traffic.PIPELINE.protocol, liar)
        with pytest.raises(WireError):
            await work(two)


@in_virtual_time
async def test_two_requests_of_one_number_are_malformed() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 60.0)))
        stream = await two.caller.transport.open(two.address, Traffic.PIPELINE.protocol, 5.0)
        for _ in range(2):
            await write_frame(stream, FrameType.REQUEST, 1, "forward", forward(1).model_dump())
        with pytest.raises(PeerUnreachable):
            await read_frame(stream, 1 << 20)


@in_virtual_time
async def test_nothing_is_told_of_a_request_that_is_answered_soon() -> None:
    async with two_peers() as two:
        two.server.handle(Ready.answered_by(cast("Any", after(lambda request: 0.5)), Traffic.PIPELINE))
        two.server.handle(Ready.answered_by(say_done, Traffic.PIPELINE))
        stream = await two.caller.transport.open(two.address, Traffic.PIPELINE.protocol, 5.0)
        await write_frame(stream, FrameType.REQUEST, 1, "ready", Ready(pair="p").model_dump())
        assert (await read_frame(stream, 1 << 20)).type is FrameType.REPLY
        await asyncio.sleep(FRAME_SECONDS)
        assert "Tasks: 0" in repr(two.server) or stream.heard < 1
        stream.close()


@in_virtual_time
async def test_no_lock_is_kept_for_peers_that_were_called_once() -> None:
    async with two_peers() as two:
        for number in range(20):
            transport = MemoryTransport(two.network, Identity.from_seed("host", number))
            await transport.start()
            host = Rpc(transport)
            host.handle(Ready.answered_by(say_done))
            await host.start()
            await two.caller.call(transport.peer_id, Ready(pair="p"), deadline=1.0)
            two.network.kill(transport.peer_id)
            with pytest.raises(PeerUnreachable):
                await two.caller.call(transport.peer_id, Ready(pair="p"), deadline=1.0)
        await asyncio.sleep(1)
        assert repr(two.caller) == idle(two.caller)
