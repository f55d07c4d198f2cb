"""Streams through a third peer: who is at the other end is proved, what passes is bounded, lies end the stream."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.transport.base import Handler, Stream
from protocol.transport.passing_on import (
    IDLE_SECONDS,
    KEPT_SECONDS,
    MOST_OF_PEER,
    MOST_PEERS,
    OPENING_SECONDS,
    PASS_ON,
    PASSED_ON,
    Asked,
    PassingOn,
)
from protocol.transport.relayed_stream import (
    MOST_IN_FRAME,
    Certificate,
    RelayedStream,
    read_frame,
    write_frame,
)
from protocol.transport.third_peers import BEGUN, PASSING_DEADLINE, REST, ThirdPeers
from tests.unit.two_peers import two_peers

ECHO = "/test/echo/1"
RATE = 1e5


@dataclass
class Peer:
    transport: MemoryTransport
    thirds: ThirdPeers
    handlers: dict[str, Handler] = field(default_factory=dict)


@dataclass
class Three:
    network: MemoryNetwork
    near: Peer
    between: Peer
    far: Peer
    folder: Path

    def willing(self, rate: float = 1e9) -> None:
        self.between.thirds.passing.limit(rate)
        assert self.between.thirds.passing.keep_for(self.far.transport.peer_id) == KEPT_SECONDS

    async def opened(self, deadline: float = 30.0) -> Stream:
        return await self.near.thirds.open(self.far.transport.peer_id, ECHO, deadline)


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1_000))


async def member(network: MemoryNetwork, folder: Path, name: str) -> Peer:
    identity, handlers = Identity.from_seed("passing", name), dict[str, Handler]()
    transport = MemoryTransport(network, identity)
    await transport.start()
    thirds = ThirdPeers(identity, transport.open, transport.open, handlers, lambda _: False)
    (folder / name).mkdir()
    thirds.begin(folder / name)
    handlers[PASS_ON], handlers[PASSED_ON] = thirds.on_pass_on, thirds.on_passed_on
    for protocol in (PASS_ON, PASSED_ON):
        await transport.serve(protocol, handlers[protocol])
    return Peer(transport, thirds, handlers)


@asynccontextmanager
async def three(folder: Path) -> AsyncIterator[Three]:
    async with two_peers() as two:
        made = []
        for name in ("near", "between", "far"):
            made.append(await member(two.network, folder, name))
        near, between, far = made
        trio = Three(two.network, near, between, far, folder)
        trio.far.handlers[ECHO] = echo
        trio.near.thirds.learn(trio.far.transport.peer_id, [trio.between.transport.peer_id])
        yield trio


def in_time(test: Callable[[Three], Awaitable[None]]) -> Callable[[Path], Awaitable[None]]:
    """Run with three peers under the virtual clock."""

    async def with_folder(tmp_path: Path) -> None:
        async with three(tmp_path) as trio:
            await test(trio)

    with_folder.__doc__ = test.__doc__
    return with_folder


@in_time
async def test_what_is_sent_arrives_and_the_peer_between_reads_none_of_it(trio: Three) -> None:
    trio.willing()
    sent, seen = os.urandom(300_000), bytearray()
    passing = trio.between.thirds.passing
    opens = passing._opens

    async def listened(peer: object, protocol: str, deadline: float) -> Stream:
        stream = await opens(peer, protocol, deadline)  # type: ignore[arg-type]
        write = stream.write

        async def copied(*buffers: object) -> None:
            for buffer in buffers:
                seen.extend(buffer)  # type: ignore[arg-type]
            await write(*buffers)  # type: ignore[arg-type]

        stream.write = copied  # type: ignore[method-assign, assignment]
        return stream

    passing._opens = listened
    stream = await trio.opened()
    assert stream.remote == trio.far.transport.peer_id
    writing = asyncio.create_task(stream.write(sent[:5], b"", memoryview(sent)[5:]))
    assert b"".join([bytes(await stream.read(50_000)) for _ in range(6)]) == sent
    await writing
    assert not any(sent[place : place + 16] in seen for place in range(0, len(sent), 10_000))
    assert 2 * len(sent) < passing.nbytes < 2.1 * len(sent)
    stream.close()


@in_time
async def test_it_keeps_to_its_rate(trio: Three) -> None:
    trio.willing(RATE)
    clock = asyncio.get_running_loop().time
    stream = await trio.opened()
    began = clock()
    writing = asyncio.create_task(stream.write(bytes(1_000_000)))
    for _ in range(100):
        await stream.read(10_000)
    await writing
    assert 19.0 < clock() - began < 23.0, "two million bytes"


@in_time
async def test_nobody_is_served_that_did_not_ask_and_those_that_did_for_a_while(trio: Three) -> None:
    passing, far = trio.between.thirds.passing, trio.far.transport.peer_id
    assert not passing.keep_for(far), "it is not willing"
    passing.limit(1e9)
    with pytest.raises(PeerUnreachable, match="through"):
        await trio.opened()
    trio.willing()
    (await trio.opened()).close()
    await asyncio.sleep(KEPT_SECONDS + 1)
    with pytest.raises(PeerUnreachable, match="through"):
        await trio.opened()
    passing.limit(0.0)
    assert not passing.keep_for(far)


@in_time
async def test_places_are_bounded(trio: Three) -> None:
    trio.willing()
    streams = [await trio.opened() for _ in range(MOST_OF_PEER)]
    with pytest.raises(PeerUnreachable, match="through"):
        await trio.opened()
    streams.pop().close()
    await asyncio.sleep(1.0)
    streams.append(await trio.opened())
    passing = trio.between.thirds.passing
    for number in range(2 * MOST_PEERS):
        passing.keep_for(Identity.from_seed("crowd", number).peer_id)
    assert not passing.keep_for(Identity.from_seed("late").peer_id)
    assert passing.keep_for(trio.far.transport.peer_id), "who is served stays so"
    for stream in streams:
        stream.close()


@in_time
async def test_a_silent_stream_ends(trio: Three) -> None:
    trio.willing()
    stream = await trio.opened()
    await asyncio.sleep(IDLE_SECONDS + 1)
    with pytest.raises(PeerUnreachable):
        await stream.read(1)
    assert "Under way: 0" in repr(trio.between.thirds.passing)


@in_time
async def test_the_peer_between_cannot_be_the_far_one(trio: Three) -> None:
    """It answers by itself, with its own certificate, or the far one's and no key."""
    between, far, near = trio.between, trio.far, Identity.from_seed("passing", "near")
    folder = trio.folder

    async def answered_by(own: Certificate, shown: bytes, stream: Stream) -> None:
        await read_frame(stream)
        await write_frame(stream, shown)
        await read_frame(stream)
        context = own.context(near.peer_id, Certificate(near, folder / "near.pem").shown, is_server=True)
        with suppress(NolocoError):
            await RelayedStream(near.peer_id, stream, context, is_server=True).shake_hands(5.0)

    mine, theirs = between.thirds._certificate, far.thirds._certificate
    assert mine is not None
    assert theirs is not None
    for shown in (mine.shown, theirs.shown, b"no certificate"):

        async def lying(stream: Stream, shown: bytes = shown) -> None:
            await answered_by(mine, shown, stream)

        await between.transport.serve(PASS_ON, lying)
        with pytest.raises(PeerUnreachable, match="through"):
            await trio.opened()


@in_time
async def test_the_far_one_is_told_of_nobody_that_is_not_there(trio: Three) -> None:
    """The peer between says that a stream is the near one's, and cannot prove it."""
    met = list[Stream]()

    async def note(stream: Stream) -> None:
        met.append(stream)

    trio.far.handlers[ECHO] = note
    mine = trio.between.thirds._certificate
    assert mine is not None
    for shown in (mine.shown, b"x"):
        stream = await trio.between.transport.open(trio.far.transport.peer_id, PASSED_ON, 5.0)
        await write_frame(stream, Asked(trio.near.transport.peer_id, ECHO).to_bytes())
        await write_frame(stream, shown)
        await read_frame(stream)  # the far one's certificate
        with pytest.raises(PeerUnreachable):
            await read_frame(stream)
    assert not met


FIRST_FRAMES = [
    b"", b"\x00", msgpack.packb([]), msgpack.packb(["x", ECHO]), msgpack.packb([1, 2]), msgpack.packb({"a": 1}),
    msgpack.packb([Identity.from_seed("passing", "far").peer_id, "x" * 200]), b"\x91" * 400,
    random.Random(1).randbytes(500), bytes(600),
]  # fmt: skip


@pytest.mark.parametrize("first", FIRST_FRAMES, ids=lambda first: f"{len(first)}-{first[:4].hex()}")
@pytest.mark.parametrize("protocol", [PASS_ON, PASSED_ON])
async def test_a_first_frame_that_says_nothing_ends_the_stream(
    protocol: str, first: bytes, tmp_path: Path
) -> None:
    async with three(tmp_path) as trio:
        trio.willing()
        end = trio.between if protocol == PASS_ON else trio.far
        stream = await trio.near.transport.open(end.transport.peer_id, protocol, 5.0)
        await stream.write(len(first).to_bytes(4, "big"), first)
        with pytest.raises(PeerUnreachable):
            await stream.read(1)


@in_time
async def test_frames_are_bounded_and_what_is_altered_ends_the_stream(trio: Three) -> None:
    trio.willing()
    passing = trio.between.thirds.passing
    stream = await trio.opened()
    carrier = stream._carrier  # type: ignore[attr-defined]
    await carrier.write((MOST_IN_FRAME + 1).to_bytes(4, "big"))
    with pytest.raises(PeerUnreachable):
        await stream.read(1)
    stream = await trio.opened()
    await write_frame(stream._carrier, os.urandom(1_000))  # type: ignore[attr-defined]
    with pytest.raises(PeerUnreachable):
        await stream.read(1)
    assert "Under way: 0" in repr(passing)


@in_time
async def test_a_far_one_that_says_nothing_is_given_up_in_time(trio: Three) -> None:
    trio.willing()

    async def silent(stream: Stream) -> None:
        await asyncio.sleep(3_600.0)

    await trio.far.transport.serve(PASSED_ON, silent)
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises((PeerUnreachable, DeadlineExceeded)):
        await trio.opened(deadline=3.0)
    assert clock() - began < 3.5
    with pytest.raises((PeerUnreachable, DeadlineExceeded)):
        await trio.opened()
    assert clock() - began < 4.0 + PASSING_DEADLINE


@in_time
async def test_streams_that_say_nothing_take_a_place_for_a_while(trio: Three) -> None:
    trio.willing()
    between = trio.between.transport.peer_id
    silent = [await trio.near.transport.open(between, PASS_ON, 5.0) for _ in range(MOST_OF_PEER)]
    with pytest.raises(PeerUnreachable, match="through"):
        await trio.opened()
    await asyncio.sleep(OPENING_SECONDS + 1)
    (await trio.opened()).close()
    for stream in silent:
        stream.close()


@in_time
async def test_one_that_passes_much_on_is_heard_now_and_then(trio: Three) -> None:
    trio.willing()
    far = trio.far.transport.peer_id
    begun = 0
    for _ in range(200):
        stream = await trio.between.transport.open(far, PASSED_ON, 5.0)
        with suppress(PeerUnreachable):
            await write_frame(stream, Asked(trio.near.transport.peer_id, ECHO).to_bytes())
            await read_frame(stream)  # the far one's certificate
            begun += 1
        stream.close()
    assert begun <= BEGUN[0][0] + 200 * 0.1 * BEGUN[0][1]
    await asyncio.sleep(BEGUN[0][0] / BEGUN[0][1])
    (await trio.opened()).close()


@in_time
async def test_who_is_shut_out_is_shut_out_of_these_streams_too(trio: Three) -> None:
    trio.willing()
    stream = await trio.opened()
    await stream.write(b"a" * 1_000)
    await stream.read(1_000)
    trio.far.thirds.shut_out(trio.near.transport.peer_id)
    with pytest.raises(PeerUnreachable):
        await stream.read(1)
    trio.far.thirds._refuses = lambda peer: peer == trio.near.transport.peer_id
    with pytest.raises(PeerUnreachable):
        await trio.opened()


def test_a_loop_of_ways_is_none(tmp_path: Path) -> None:
    me, other = Identity.from_seed("me"), Identity.from_seed("other")

    async def nobody(*_: object) -> Stream:
        raise PeerUnreachable("nobody")

    thirds = ThirdPeers(me, nobody, nobody, {}, lambda _: False)
    thirds.learn(other.peer_id, [me.peer_id, other.peer_id])
    assert thirds.ways_to(other.peer_id) == []
    assert PassingOn(nobody, lambda: 0.0).nbytes == 0


@in_time
async def test_a_way_through_which_nothing_came_is_the_last_that_is_tried_for_a_while(trio: Three) -> None:
    trio.willing()
    gone, between, far = (
        Identity.from_seed("gone").peer_id,
        trio.between.transport.peer_id,
        trio.far.transport.peer_id,
    )
    first = await trio.opened()  # so that there are more streams through that one
    trio.near.thirds.learn(far, [between, gone])
    opens, tried = trio.near.thirds._opens, list[str]()

    async def noted(peer: PeerId, protocol: str, deadline: float) -> Stream:
        tried.append(peer)
        return await opens(peer, protocol, deadline)

    trio.near.thirds._opens = noted
    for expected in ([gone, between], [between], [between]):
        (await trio.opened()).close()
        assert tried == expected
        tried.clear()
    await asyncio.sleep(REST)
    (await trio.opened()).close()
    assert tried == [gone, between]
    first.close()


@in_time
async def test_streams_go_through_both_ways_to_a_peer(trio: Three) -> None:
    near, far = trio.near, trio.far
    other = await member(trio.network, trio.folder, "other between")
    for between in (trio.between, other):
        between.thirds.passing.limit(1e9)
        assert between.thirds.passing.keep_for(far.transport.peer_id)
    near.thirds.learn(far.transport.peer_id, [trio.between.transport.peer_id, other.transport.peer_id])
    streams = [await trio.opened() for _ in range(6)]
    through = Counter(stream.through for stream in streams if isinstance(stream, RelayedStream))
    assert set(through.values()) == {3}
    streams = [s for s in streams if isinstance(s, RelayedStream) and s.through == other.transport.peer_id]
    far.handlers["/test/other/1"] = echo
    one = await near.thirds.open(far.transport.peer_id, "/test/other/1", 5.0)
    two = await near.thirds.open(far.transport.peer_id, "/test/other/1", 5.0)
    assert one.through != two.through, "the streams of each protocol are spread by themselves"
    for stream in [*streams, one, two]:
        stream.close()


@in_time
async def test_a_peer_that_names_itself_is_hidden_and_given_up_at_once(trio: Three) -> None:
    far, clock = trio.far.transport.peer_id, asyncio.get_running_loop().time
    trio.near.thirds.learn(far, [far])
    assert trio.near.thirds.calls_itself_hidden(far)
    began = clock()
    with pytest.raises(PeerUnreachable, match="nobody passes streams on to it"):
        await trio.opened()
    assert clock() == began, "nobody is asked"
    trio.near.thirds.learn(far, [])
    assert not trio.near.thirds.calls_itself_hidden(far)


def test_a_third_peer_is_needed_unless_there_was_a_connection(tmp_path: Path) -> None:
    async def nobody(*_: object) -> Stream:
        raise PeerUnreachable("nobody")

    thirds = ThirdPeers(Identity.from_seed("me"), nobody, nobody, {}, lambda _: False)
    far, between = (Identity.from_seed("passing", name).peer_id for name in ("far", "between"))
    assert not thirds.is_needed_for(far)
    thirds.learn(far, [between])
    assert thirds.is_needed_for(far)
    thirds.note_direct(far, is_direct=True)
    assert not thirds.is_needed_for(far)
    thirds.note_direct(far, is_direct=False)
    assert thirds.is_needed_for(far)


@in_time
async def test_streams_know_once_there_is_a_direct_connection(trio: Three) -> None:
    trio.willing()
    far = trio.far.transport.peer_id
    assert trio.near.thirds.relayed() == []
    stream = await trio.opened()
    await asyncio.sleep(0.1)
    assert trio.near.thirds.relayed() == [far]
    assert trio.far.thirds.relayed() == [trio.near.transport.peer_id], "the far end may dial as well"
    assert not stream.is_superseded
    trio.near.thirds.supersede(far)
    assert stream.is_superseded
    other = await trio.opened()
    assert not other.is_superseded
    other.close()
    stream.close()
