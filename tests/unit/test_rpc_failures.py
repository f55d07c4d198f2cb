"""Requests whose deadline passes, or whose peer freezes, dies or leaves."""

from __future__ import annotations

import asyncio

import pytest
import torch

from bootstrap.lab.in_memory.memory_link import Link
from protocol.codecs.codec import Encoded, encode
from protocol.errors import (
    DeadlineExceeded,
    PeerUnreachable,
    TransportDown,
)
from protocol.messages import Done
from protocol.messages.peers import Introduce
from protocol.messages.state import GetStateIndex
from protocol.messages.training import Forward, Ready
from protocol.rpc.patience import FRAME_SECONDS
from protocol.rpc.rpc import Answer, Request, Traffic
from tests.unit.two_peers import after, forward, in_virtual_time, say_done, two_peers

SLOW = Link(latency=0.01, bandwidth=1e6)  # bytes a second


def megabytes(count: int) -> list[Encoded]:
    return [encode(torch.zeros(count * 250_000), "fp32")]


@in_virtual_time
async def test_a_deadline_passes_and_the_late_answer_harms_nobody() -> None:
    async with two_peers() as two:
        two.server.handle(
            Forward.answered_by(after(lambda request: float(request.message.stage)), Traffic.GOSSIP)
        )
        with pytest.raises(DeadlineExceeded, match=r"no answer to forward within 1\.0 s"):
            await two.ask(forward(3), deadline=1.0)
        reply, _ = await two.ask(forward(4))  # the answer to the first comes while this one waits
        assert reply.step == 4


@in_virtual_time
async def test_a_frozen_peer_costs_the_deadline_and_answers_again_when_it_wakes() -> None:
    async with two_peers() as two:
        two.server.handle(Ready.answered_by(say_done, Traffic.GOSSIP))
        await two.ask()
        two.network.freeze(two.address)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await two.ask(deadline=2.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)
        two.network.thaw(two.address)
        await two.ask()


@in_virtual_time
async def test_a_peer_that_dies_during_a_call_is_unreachable_at_once() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 100.0), Traffic.GOSSIP))
        calls = [asyncio.create_task(two.ask(forward(n), deadline=50.0)) for n in range(3)]
        await asyncio.sleep(1)
        two.network.kill(two.address)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, PeerUnreachable) for result in results)
        assert asyncio.get_running_loop().time() < 2
        with pytest.raises(PeerUnreachable):
            await two.ask()


@in_virtual_time
async def test_a_frame_that_has_begun_is_sent_whole_and_its_deadline_costs_nobody_else() -> None:
    async with two_peers(SLOW) as two:
        two.server.limit({Traffic.GOSSIP: 64_000_000})
        two.server.handle(
            Forward.answered_by(after(lambda request: float(request.message.stage)), Traffic.GOSSIP)
        )
        other = asyncio.create_task(two.ask(forward(8), deadline=50.0))
        await asyncio.sleep(0.5)
        bulk = asyncio.create_task(two.ask(forward(1), tensors=megabytes(6), deadline=1.0))
        await asyncio.sleep(0.5)
        with pytest.raises(DeadlineExceeded):  # it waits for its turn, and nothing of it is sent
            await two.ask(forward(2), deadline=2.0)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0, abs=0.1)
        with pytest.raises(DeadlineExceeded):
            await bulk
        assert asyncio.get_running_loop().time() < 7
        reply, _ = await other
        assert reply.step == 8
        reply, _ = await two.ask(forward(3))
        assert reply.step == 3


@in_virtual_time
async def test_a_frame_cut_short_closes_the_stream_and_the_next_call_works() -> None:
    async with two_peers(SLOW) as two:
        two.server.limit({Traffic.GOSSIP: 64_000_000})
        two.server.handle(Ready.answered_by(say_done, Traffic.GOSSIP))
        await two.ask()
        with pytest.raises(DeadlineExceeded):
            await two.ask(tensors=megabytes(16), deadline=1.0)
        await two.ask()
        assert not two.server.is_banned(two.caller.transport.peer_id)


@in_virtual_time
async def test_others_on_a_stream_that_was_cut_short_learn_it_at_once() -> None:
    async with two_peers(SLOW) as two:
        two.server.limit({Traffic.GOSSIP: 64_000_000})
        two.server.handle(Forward.answered_by(after(lambda request: 100.0), Traffic.GOSSIP))
        other = asyncio.create_task(two.ask(forward(1), deadline=50.0))
        await asyncio.sleep(0.5)
        with pytest.raises(DeadlineExceeded):
            await two.ask(forward(2), tensors=megabytes(16), deadline=1.0)
        with pytest.raises(PeerUnreachable):
            await other
        assert asyncio.get_running_loop().time() == pytest.approx(0.5 + FRAME_SECONDS, abs=0.1)


@in_virtual_time
async def test_a_node_that_closes_ends_its_own_calls() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 100.0), Traffic.GOSSIP))
        call = asyncio.create_task(two.ask(forward(1), deadline=50.0))
        await asyncio.sleep(1)
        await two.caller.close()
        with pytest.raises(TransportDown):
            await call


@in_virtual_time
async def test_a_server_that_closes_ends_what_it_was_asked() -> None:
    async with two_peers() as two:
        two.server.handle(Forward.answered_by(after(lambda request: 100.0), Traffic.GOSSIP))
        call = asyncio.create_task(two.ask(forward(1), deadline=50.0))
        await asyncio.sleep(1)
        await two.server.close()
        await two.server.transport.close()
        with pytest.raises(PeerUnreachable):
            await call
        assert asyncio.get_running_loop().time() < 2


@in_virtual_time
async def test_who_does_not_take_a_record_costs_each_call_its_own_deadline() -> None:
    """Failed before: a call waited for the introduction of another one, as long as that one's deadline."""

    async def hold(request: Request) -> Answer:
        await asyncio.sleep(1e6)
        return Answer(Done())

    async with two_peers() as two:
        now = two.network.now()
        two.caller.introduction = Introduce(stage=0, record=b"sealed", expires=now + 3_600)
        two.server.handle(Introduce.answered_by(hold))

        async def ask(deadline: float) -> float:
            with pytest.raises(DeadlineExceeded):
                await two.ask(GetStateIndex(), deadline, traffic=Traffic.STATE)
            return asyncio.get_running_loop().time()

        took = await asyncio.gather(ask(60.0), ask(2.0), ask(60.0), ask(60.0))
        assert took == [pytest.approx(deadline, abs=0.1) for deadline in (60.0, 2.0, 60.0, 60.0)]
