"""Requests and replies between two peers in memory: order, refusals, deadlines, deaths and bad manners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from protocol.bans import BAN_AFTER_STRIKES, BAN_SECONDS
from protocol.codec import encode
from protocol.errors import (
    CodecError,
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.frames import FrameType, read_frame, write_frame
from protocol.identity import Identity
from protocol.messages import Accept, Done, Forward, Gradient, Hello, Ready
from protocol.places import MOST
from protocol.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import Stream
from protocol.transport.memory import MemoryTransport
from protocol.transport.memory_link import Link
from protocol.transport.memory_network import MemoryNetwork
from protocol.transport.virtual_time import run_virtual

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@dataclass
class Two:
    """A caller and a server that know each other."""

    network: MemoryNetwork
    caller: Rpc
    server: Rpc

    async def ask(self, message: Any = None, reply: Any = Done, deadline: float = 5.0, **more: Any) -> Any:
        traffic = more.pop("traffic", Traffic.GOSSIP)
        request = message or Ready(pair="p")
        return await self.caller.call(self.address, traffic, request, reply, deadline=deadline, **more)

    @property
    def address(self) -> Any:
        return self.server.transport.peer_id

    async def raw_stream(self) -> Stream:
        return await self.caller.transport.open(self.address, Traffic.GOSSIP.protocol, 5.0)


@asynccontextmanager
async def two_peers(link: Link | None = None) -> AsyncIterator[Two]:
    network = MemoryNetwork(0, link or Link(latency=0.01))
    peers = []
    for name in ("caller", "server"):
        transport = MemoryTransport(network, Identity.from_seed(name))
        await transport.start()
        peers.append(Rpc(transport))
        await peers[-1].start()
    try:
        yield Two(network, *peers)
    finally:
        for rpc in peers:
            await rpc.close()
            await rpc.transport.close()


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def say_done(request: Request) -> Answer:
    return Answer(Done())


def accept(number: int) -> Accept:
    return Accept(round=number, opens_in=0.5, due_in=1.0, ends_in=1.5, step_seconds=0.1)


def after(delay: Callable[[Request], float]) -> Callable[[Request], Awaitable[Answer]]:
    async def handler(request: Request) -> Answer:
        await asyncio.sleep(delay(request))
        return Answer(accept(request.message.stage))

    return handler


def forward(number: int) -> Forward:
    return Forward(microbatch=f"m{number}", stage=number)


# --- good manners -------------------------------------------------------------------------------


@in_virtual_time
async def test_tensors_go_there_and_back() -> None:
    async def double(request: Request) -> Answer:
        [tensor] = request.tensors()
        return Answer(Gradient(loss=1.0, queue=0, step=0, seconds=0.0), [encode(tensor * 2, "fp32")])

    async with two_peers() as two:
        two.server.handle(Traffic.PIPELINE, Forward, double)
        sent = torch.arange(12.0).view(3, 4)
        reply, [received] = await two.ask(
            forward(1), Gradient, tensors=[encode(sent, "fp32")], traffic=Traffic.PIPELINE
        )
        assert reply.loss == 1.0
        assert torch.equal(received, sent * 2)


@in_virtual_time
async def test_requests_in_flight_are_answered_out_of_order_and_each_to_its_asker() -> None:
    async with two_peers() as two:
        finished: list[int] = []

        async def ask(number: int) -> None:
            reply, _ = await two.ask(forward(number), Accept)
            assert reply.round == number
            finished.append(number)

        two.server.handle(Traffic.GOSSIP, Forward, after(lambda request: 1.0 - request.message.stage / 100))
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

        two.server.handle(Traffic.GOSSIP, Ready, slow)
        await asyncio.gather(*(two.ask() for _ in range(3 * MOST)))
        assert most == MOST


@in_virtual_time
async def test_bulk_does_not_delay_a_small_message_of_another_class() -> None:
    async with two_peers(Link(latency=0.01, bandwidth=1e6)) as two:
        two.server.limit({Traffic.STATE: 64_000_000})
        two.server.handle(Traffic.STATE, Ready, say_done)
        two.server.handle(Traffic.CONTROL, Ready, say_done)
        loop = asyncio.get_running_loop()
        bulk = [encode(torch.zeros(4_000_000), "fp32")]  # 16 s on this link
        transfer = loop.create_task(two.ask(tensors=bulk, traffic=Traffic.STATE, deadline=60))
        await asyncio.sleep(1)
        began = loop.time()
        await two.ask(traffic=Traffic.CONTROL)
        assert loop.time() - began < 2
        assert not transfer.done()
        await transfer


# --- refusals -----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_refusal_comes_with_its_code_and_reason() -> None:
    async def refuse(request: Request) -> Answer:
        raise Refused("busy", "7 wait here already")

    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, refuse)
        with pytest.raises(Refused, match="7 wait here already") as refusal:
            await two.ask()
        assert refusal.value.code == "busy"


@in_virtual_time
async def test_an_unknown_request_is_refused_and_the_stream_stays_usable() -> None:
    async with two_peers() as two:
        with pytest.raises(Refused) as refusal:
            await two.ask()
        assert refusal.value.code == "unknown-request"
        two.server.handle(Traffic.GOSSIP, Ready, say_done)
        await two.ask()
        with pytest.raises(Refused):
            await two.ask(traffic=Traffic.STATE)  # registered for another class of traffic


def test_a_bug_in_a_handler_is_told_as_internal_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: Request) -> Answer:
        raise RuntimeError("/home/volunteer/secret")

    async def main() -> None:
        async with two_peers() as two:
            two.server.handle(Traffic.GOSSIP, Ready, broken)
            with pytest.raises(Refused) as refusal:
                await two.ask()
            assert refusal.value.code == "internal"
            assert "secret" not in str(refusal.value)
            two.server.handle(Traffic.GOSSIP, Ready, say_done)
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
            two.server.handle(Traffic.GOSSIP, Ready, loses_a_peer)
            with pytest.raises(Refused):
                await two.ask(deadline=60)
            assert asyncio.get_running_loop().time() < 1

    run_virtual(main())


@in_virtual_time
async def test_an_answer_of_another_kind_is_malformed_and_counts() -> None:
    async def odd(request: Request) -> Answer:
        return Answer(accept(1))

    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, odd)
        for _ in range(BAN_AFTER_STRIKES):
            with pytest.raises(WireError, match="expected done, got accept"):
                await two.ask()
        assert two.caller.is_banned(two.address)


# --- deadlines and deaths -----------------------------------------------------------------------


@in_virtual_time
async def test_a_deadline_passes_and_the_late_answer_harms_nobody() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Forward, after(lambda request: float(request.message.stage)))
        with pytest.raises(DeadlineExceeded, match=r"no answer to forward within 1\.0 s"):
            await two.ask(forward(3), Accept, deadline=1.0)
        reply, _ = await two.ask(forward(4), Accept)  # the answer to the first comes while this one waits
        assert reply.round == 4


@in_virtual_time
async def test_a_frozen_peer_costs_the_deadline_and_answers_again_when_it_wakes() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, say_done)
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
        two.server.handle(Traffic.GOSSIP, Forward, after(lambda request: 100.0))
        calls = [asyncio.create_task(two.ask(forward(n), Accept, deadline=50.0)) for n in range(3)]
        await asyncio.sleep(1)
        two.network.kill(two.address)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, PeerUnreachable) for result in results)
        assert asyncio.get_running_loop().time() < 2
        with pytest.raises(PeerUnreachable):
            await two.ask()


@in_virtual_time
async def test_a_write_cut_short_by_a_deadline_closes_the_stream_and_the_next_call_works() -> None:
    async with two_peers(Link(latency=0.01, bandwidth=1e6)) as two:
        two.server.limit({Traffic.GOSSIP: 64_000_000})
        two.server.handle(Traffic.GOSSIP, Ready, say_done)
        await two.ask()
        with pytest.raises(DeadlineExceeded):
            await two.ask(tensors=[encode(torch.zeros(4_000_000), "fp32")], deadline=1.0)
        await two.ask()
        assert not two.server.is_banned(two.caller.transport.peer_id)


@in_virtual_time
async def test_others_on_a_stream_that_was_cut_short_learn_it_at_once() -> None:
    async with two_peers(Link(latency=0.01, bandwidth=1e6)) as two:
        two.server.limit({Traffic.GOSSIP: 64_000_000})
        two.server.handle(Traffic.GOSSIP, Forward, after(lambda request: 100.0))
        other = asyncio.create_task(two.ask(forward(1), Accept, deadline=50.0))
        await asyncio.sleep(0.5)
        with pytest.raises(DeadlineExceeded):
            await two.ask(forward(2), tensors=[encode(torch.zeros(4_000_000), "fp32")], deadline=1.0)
        with pytest.raises(PeerUnreachable):
            await other
        assert asyncio.get_running_loop().time() < 5


@in_virtual_time
async def test_a_node_that_closes_ends_its_own_calls() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Forward, after(lambda request: 100.0))
        call = asyncio.create_task(two.ask(forward(1), Accept, deadline=50.0))
        await asyncio.sleep(1)
        await two.caller.close()
        with pytest.raises(TransportDown):
            await call


@in_virtual_time
async def test_a_server_that_closes_ends_what_it_was_asked() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Forward, after(lambda request: 100.0))
        call = asyncio.create_task(two.ask(forward(1), Accept, deadline=50.0))
        await asyncio.sleep(1)
        await two.server.close()
        await two.server.transport.close()
        with pytest.raises(PeerUnreachable):
            await call
        assert asyncio.get_running_loop().time() < 2


# --- bad manners --------------------------------------------------------------------------------


async def send_garbage(two: Two) -> None:
    stream = await two.raw_stream()
    await stream.write(b"GET / HTTP/1.1\r\nHost: noloco\r\n\r\n")
    with pytest.raises(PeerUnreachable):
        await stream.read(1)  # the other side closed it
    stream.close()


async def send_malformed_request(two: Two) -> str:
    stream = await two.raw_stream()
    await write_frame(stream, FrameType.REQUEST, 1, "ready", {"pair": 7})
    answer = await read_frame(stream, 1024)
    stream.close()
    return answer.kind


@in_virtual_time
async def test_garbage_closes_the_stream_and_repeated_garbage_bans_for_a_while() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, say_done)
        for _ in range(BAN_AFTER_STRIKES - 1):
            await send_garbage(two)
        await two.ask()  # still welcome
        await send_garbage(two)
        two.caller.forget(two.address)
        with pytest.raises(PeerUnreachable):
            await two.ask()
        await asyncio.sleep(BAN_SECONDS)
        await two.ask()


@in_virtual_time
async def test_a_malformed_request_is_refused_and_counted_and_the_ban_ends_open_streams() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, say_done)
        await two.ask()
        for _ in range(BAN_AFTER_STRIKES):
            assert await send_malformed_request(two) == "malformed"
        with contextlib.suppress(PeerUnreachable):
            await two.ask()  # the one that was being waited for when the ban came
        with pytest.raises(PeerUnreachable):
            await two.ask()


@in_virtual_time
async def test_a_frame_larger_than_its_class_allows_is_refused_unread() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, say_done)
        two.server.limit({Traffic.GOSSIP: 1000})
        with pytest.raises(PeerUnreachable):
            await two.ask(tensors=[encode(torch.zeros(1000), "fp32")])
        await two.ask(tensors=[encode(torch.zeros(250), "fp32")])


@in_virtual_time
async def test_an_answer_larger_than_its_class_allows_ends_the_call_and_counts() -> None:
    async def flood(request: Request) -> Answer:
        return Answer(Done(), [encode(torch.zeros(1000), "fp32")])

    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, flood)
        two.caller.limit({Traffic.GOSSIP: 1000})
        for _ in range(BAN_AFTER_STRIKES):
            with pytest.raises(WireError, match="payload of 4000 bytes"):
                await two.ask()
        assert two.caller.is_banned(two.address)


@in_virtual_time
async def test_a_reply_sent_as_a_request_is_malformed() -> None:
    async with two_peers() as two:
        stream = await two.raw_stream()
        await write_frame(stream, FrameType.REPLY, 1, "done", {})
        answer = await read_frame(stream, 1024)
        assert (answer.type, answer.kind) == (FrameType.REFUSAL, "malformed")
        stream.close()


@in_virtual_time
async def test_a_handler_that_finds_its_tensors_damaged_counts_it() -> None:
    async def picky(request: Request) -> Answer:
        raise CodecError("the shape is wrong")

    async with two_peers() as two:
        two.server.handle(Traffic.GOSSIP, Ready, picky)
        for _ in range(BAN_AFTER_STRIKES):
            with pytest.raises(Refused) as refusal:
                await two.ask()
            assert refusal.value.code == "malformed"
        assert two.server.is_banned(two.caller.transport.peer_id)


@in_virtual_time
async def test_nothing_is_kept_for_peers_that_came_and_went() -> None:
    async with two_peers() as two:
        two.server.handle(Traffic.CONTROL, Hello, say_done)
        for number in range(20):
            transport = MemoryTransport(two.network, Identity.from_seed("guest", number))
            await transport.start()
            guest = Rpc(transport)
            await guest.start()
            await guest.call(two.address, Traffic.CONTROL, Hello(), Done, deadline=1.0)
            await guest.close()
            await transport.close()
        await asyncio.sleep(1)
        assert not two.server._streams_from
        assert not two.server._tasks


@in_virtual_time
async def test_a_caller_keeps_nothing_for_peers_that_died() -> None:
    async with two_peers() as two:
        for number in range(20):
            transport = MemoryTransport(two.network, Identity.from_seed("host", number))
            await transport.start()
            host = Rpc(transport)
            host.handle(Traffic.CONTROL, Hello, say_done)
            await host.start()
            await two.caller.call(transport.peer_id, Traffic.CONTROL, Hello(), Done, deadline=1.0)
            two.network.kill(transport.peer_id)
        await asyncio.sleep(1)
        assert not two.caller._channels
        assert not two.caller._tasks
