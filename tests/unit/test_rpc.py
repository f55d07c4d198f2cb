"""Requests and replies between two peers in memory: order, classes of traffic, refusals."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.access.peer_limits import BAN_AFTER_STRIKES, MOST
from protocol.codecs.codec import encode
from protocol.errors import (
    PeerUnreachable,
    Refused,
    WireError,
)
from protocol.messages import Done
from protocol.messages.training import Forward, Gradient, Ready
from protocol.records.identity import Identity
from protocol.rpc.rpc import IDLE_SECONDS, Answer, Request, Rpc, Traffic
from tests.unit.two_peers import after, forward, gradient, in_virtual_time, say_done, two_peers

# --- good manners ----------------------------------------------------------------------------------


@in_virtual_time
async def test_tensors_go_there_and_back() -> None:
    async def double(request: Request) -> Answer:
        [tensor] = request.tensors()
        return Answer(Gradient(loss=1.0, queue=0, step=0, seconds=0.0), [encode(tensor * 2, "fp32")])

    async with two_peers() as two:
        two.server.handle(Forward.answered_by(double))
        sent = torch.arange(12.0).view(3, 4)
        reply, [received] = await two.ask(
            forward(1), tensors=[encode(sent, "fp32")], traffic=Traffic.PIPELINE
        )
        assert reply.loss == 1.0
        assert torch.equal(received, sent * 2)


@in_virtual_time
async def test_a_small_request_does_not_wait_for_its_stream_to_open() -> None:
    """Nobody asks more partners for a round than one has talked to before, and each was a round trip more."""
    clock = asyncio.get_running_loop().time
    async with two_peers(Link(latency=0.5)) as two:
        two.server.handle(*(Ready.answered_by(say_done, traffic) for traffic in Traffic))
        seconds = []
        for size in (8, 1 << 16):
            began = clock()
            tensors = [encode(torch.zeros(size), "fp32")]
            traffic = Traffic.GOSSIP if size == 8 else Traffic.CONTROL
            await two.ask(tensors=tensors, traffic=traffic)
            seconds.append(round(clock() - began, 3))
        assert seconds == [1.0, 2.0]  # what is large asks first


@in_virtual_time
async def test_requests_in_flight_are_answered_out_of_order_and_each_to_its_asker() -> None:
    async with two_peers() as two:
        finished: list[int] = []

        async def ask(number: int) -> None:
            reply, _ = await two.ask(forward(number))
            assert reply.step == number
            finished.append(number)

        two.server.handle(
            Forward.answered_by(after(lambda request: 1.0 - request.message.stage / 100), Traffic.GOSSIP)
        )
        await asyncio.gather(*(ask(number) for number in range(50)))
        assert finished == list(reversed(range(50)))


@in_virtual_time
async def test_more_requests_than_are_handled_at_once_all_get_their_answer() -> None:
    async with two_peers() as two:
        at_once, most = 0, 0

        async def slow(request: Request) -> Answer:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.1)
            at_once -= 1
            return Answer(Done())

        two.server.handle(Ready.answered_by(slow, Traffic.GOSSIP))
        await asyncio.gather(*(two.ask() for _ in range(3 * MOST)))
        assert most == MOST


@in_virtual_time
async def test_bulk_does_not_delay_a_small_message_of_another_class() -> None:
    async with two_peers(Link(latency=0.01, bandwidth=1e6)) as two:
        two.server.limit({Traffic.STATE: 64_000_000})
        two.server.handle(Ready.answered_by(say_done, Traffic.STATE))
        two.server.handle(Ready.answered_by(say_done, Traffic.CONTROL))
        loop = asyncio.get_running_loop()
        bulk = [encode(torch.zeros(4_000_000), "fp32")]  # 16 s on this link
        transfer = loop.create_task(two.ask(tensors=bulk, traffic=Traffic.STATE, deadline=60))
        await asyncio.sleep(1)
        began = loop.time()
        await two.ask(traffic=Traffic.CONTROL)
        assert loop.time() - began < 2
        assert not transfer.done()
        await transfer


# --- refusals --------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_refusal_comes_with_its_code_and_reason() -> None:
    async def refuse(request: Request) -> Answer:
        raise Refused("busy", "7 wait here already")

    async with two_peers() as two:
        two.server.handle(Ready.answered_by(refuse, Traffic.GOSSIP))
        with pytest.raises(Refused, match="7 wait here already") as refusal:
            await two.ask()
        assert refusal.value.code == "busy"


@in_virtual_time
async def test_an_unknown_request_is_refused_and_the_stream_stays_usable() -> None:
    async with two_peers() as two:
        with pytest.raises(Refused) as refusal:
            await two.ask()
        assert refusal.value.code == "unknown-request"
        two.server.handle(Ready.answered_by(say_done, Traffic.GOSSIP))
        await two.ask()
        with pytest.raises(Refused):
            await two.ask(traffic=Traffic.STATE)  # registered for another class of traffic


def test_a_bug_in_a_handler_is_told_as_internal_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: Request) -> Answer:
        raise RuntimeError("/home/volunteer/secret")

    async def main() -> None:
        async with two_peers() as two:
            two.server.handle(Ready.answered_by(broken, Traffic.GOSSIP))
            with pytest.raises(Refused) as refusal:
                await two.ask()
            assert refusal.value.code == "internal"
            assert "secret" not in str(refusal.value)
            two.server.handle(Ready.answered_by(say_done, Traffic.GOSSIP))
            await two.ask()

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert "secret" in caplog.text  # in the own log, where it helps


def test_a_handler_that_loses_its_own_peer_answers_that_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    """As an evaluation does whose next stage died: the caller must not wait out its whole deadline."""

    async def loses_a_peer(request: Request) -> Answer:
        raise PeerUnreachable("the next stage is gone")

    async def main() -> None:
        async with two_peers() as two:
            two.server.handle(Ready.answered_by(loses_a_peer, Traffic.GOSSIP))
            with pytest.raises(Refused):
                await two.ask(deadline=60)
            assert asyncio.get_running_loop().time() < 1

    run_virtual(main())


@in_virtual_time
async def test_an_answer_of_another_kind_is_malformed_and_counts() -> None:
    async def odd(request: Request) -> Answer:
        return Answer(gradient(1))

    async with two_peers() as two:
        two.server.handle(Ready.answered_by(odd, Traffic.GOSSIP))
        for _ in range(BAN_AFTER_STRIKES):
            with pytest.raises(WireError, match="expected done, got gradient"):
                await two.ask()
        assert two.caller.is_banned(two.address)


@in_virtual_time
async def test_streams_do_not_add_up_to_all_peers_ever_met() -> None:
    async with two_peers() as two:
        caller, others = two.caller, list[Rpc]()
        for number in range(60):
            transport = MemoryTransport(two.network, Identity.from_seed(f"other {number}"))
            await transport.start()
            others.append(Rpc(transport))
            await others[-1].start()
            others[-1].handle(Ready.answered_by(say_done, Traffic.GOSSIP))
            await caller.transport.connect(transport.addresses(), 5.0)
            await caller.call(transport.peer_id, Ready(pair="p"), deadline=5.0, traffic=Traffic.GOSSIP)
            await asyncio.sleep(30)
        assert len(caller.channels) <= IDLE_SECONDS / 30 + 1
        again = others[0].transport.peer_id  # one that was closed is opened again
        await caller.call(again, Ready(pair="p"), deadline=5.0, traffic=Traffic.GOSSIP)
        assert sum(other.streams_of(caller.transport.peer_id) for other in others) == len(caller.channels)
        for other in others:
            await other.close()
            await other.transport.close()
