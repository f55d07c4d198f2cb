"""Requests leave a stream for a better one, one at a time, and what is under way on the old one is answered."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.lab.in_memory.memory_stream import MemoryStream
from protocol.errors import PeerUnreachable
from protocol.messages import Done
from protocol.messages.training import Ready
from protocol.rpc.rpc import Answer, Request, Traffic
from protocol.transport.base import Stream
from tests.unit.two_peers import in_virtual_time, two_peers

ANSWER = 5.0


async def slow(request: Request[Ready]) -> Answer[Done]:
    await asyncio.sleep(ANSWER if request.message.pair == "slow" else 0.0)
    return Answer(Done())


@pytest.fixture
def superseded(monkeypatch: pytest.MonkeyPatch) -> set[Stream]:
    """The streams to which there is a better one."""
    found = set[Stream]()
    monkeypatch.setattr(MemoryStream, "is_superseded", property(lambda self: self in found), raising=False)
    return found


def test_a_request_under_way_is_answered_on_the_stream_that_is_left(superseded: set[Stream]) -> None:
    @in_virtual_time
    async def main() -> None:
        async with two_peers() as two:
            two.server.handle(Ready.answered_by(slow, Traffic.GOSSIP))
            await two.ask()
            (old,) = two.caller.channels
            waits = asyncio.create_task(two.ask(Ready(pair="slow"), deadline=2 * ANSWER))
            await asyncio.sleep(0.1)
            superseded.add(old.stream)
            await two.ask()
            (new,) = two.caller.channels
            assert new is not old
            assert old.waiting
            assert two.server.streams_of(two.caller.transport.peer_id) == 2
            await waits
            await asyncio.sleep(1.0)
            assert two.caller.channels == [new]
            assert two.server.streams_of(two.caller.transport.peer_id) == 1
            await two.ask()
            assert two.caller.channels == [new]

    main()


def test_streams_of_a_peer_are_left_one_after_another(superseded: set[Stream]) -> None:
    """A peer has places for a few streams alone."""

    @in_virtual_time
    async def main() -> None:
        async with two_peers() as two:
            for traffic in (Traffic.GOSSIP, Traffic.PAIRING):
                two.server.handle(Ready.answered_by(slow, traffic))
                await two.ask(traffic=traffic)
            waits = [
                asyncio.create_task(two.ask(Ready(pair="slow"), deadline=2 * ANSWER, traffic=traffic))
                for traffic in (Traffic.GOSSIP, Traffic.PAIRING)
            ]
            await asyncio.sleep(0.1)
            superseded.update(channel.stream for channel in two.caller.channels)
            for traffic in (Traffic.GOSSIP, Traffic.PAIRING):
                await two.ask(traffic=traffic)
            assert two.server.streams_of(two.caller.transport.peer_id) == 3
            await asyncio.gather(*waits)
            await asyncio.sleep(1.0)
            await two.ask(traffic=Traffic.PAIRING)
            assert not any(channel.stream in superseded for channel in two.caller.channels)

    main()


def test_where_none_can_be_opened_the_old_one_goes_on(
    superseded: set[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_virtual_time
    async def main() -> None:
        async with two_peers() as two:
            two.server.handle(Ready.answered_by(slow, Traffic.GOSSIP))
            await two.ask()
            (old,) = two.caller.channels
            superseded.add(old.stream)

            async def nothing(*_: object, **__: object) -> Stream:
                raise PeerUnreachable("it rests")

            monkeypatch.setattr(two.caller.transport, "open", nothing)
            await two.ask()
            assert two.caller.channels == [old]

    main()
