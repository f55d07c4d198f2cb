"""The modelled world: links cost what they should to the microsecond, faults do what they say, seeds repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bootstrap.lab.in_memory.memory import Link, LinkModel, MemoryNetwork, MemoryTransport, StreamLimits
from bootstrap.lab.in_memory.memory_link import BULK_BYTES
from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.errors import DeadlineExceeded, PeerUnreachable, TransportDown, UserError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.transport.base import Stream
from tests.transport_network import ECHO, KEY, ask, echo

SOON = 5.0  # seconds; longer than anything here takes, unless something is broken
SINK = "/noloco/test/sink"
MB = 1_000_000
IDEAL = Link()
USUAL = StreamLimits()


def now() -> float:
    return asyncio.get_running_loop().time()


def close_to(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-6)


def about(seconds: float) -> object:
    """To a chunk: of streams that take turns, one is the first to be ready."""
    return pytest.approx(seconds, abs=0.05)


async def swarm(
    size: int,
    link: Link | LinkModel = IDEAL,
    limits: StreamLimits = USUAL,
    seed: int = 0,
) -> tuple[MemoryNetwork, list[MemoryTransport]]:
    """Peers that have joined through the first one, and serve `ECHO` and `SINK`."""
    network = MemoryNetwork(seed, link, limits)
    peers = [MemoryTransport(network, Identity.from_seed("memory", number)) for number in range(size)]
    for peer in peers:
        await peer.start()
        await peer.serve(ECHO, echo)
        await peer.serve(SINK, sink)
        await peer.connect(peers[0].addresses(), 60)
    return network, peers


async def sink(stream: Stream) -> None:
    """Read eight bytes of length and that much, answer with one byte, again and again."""
    while True:
        await stream.read(int.from_bytes(await stream.read(8), "big"))
        await stream.write(b"!")


async def send(stream: Stream, size: int) -> float:
    """The time from the start of a transfer to its acknowledgement."""
    started = now()
    await asyncio.gather(stream.write(size.to_bytes(8, "big"), bytes(size)), stream.read(1))
    return now() - started


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            await test()

        run_virtual(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# --- what a link costs


@virtual
async def test_latency_and_bandwidth_are_exact() -> None:
    _, (a, b) = await swarm(2, Link(latency=0.05, bandwidth=10 * MB))
    started = now()
    stream = await a.open(b.peer_id, SINK, SOON)
    assert now() - started == close_to(0.1)
    assert await send(stream, 20 * MB) == close_to(8 / (10 * MB) + 2.0 + 0.05 + 1 / (10 * MB) + 0.05)


@virtual
async def test_throughput_over_a_long_way_is_limited_by_the_window() -> None:
    """As on the internet: no more than a window of bytes for each round trip."""
    _, (a, b) = await swarm(2, Link(latency=0.1), StreamLimits(window=1 * MB, chunk=MB // 4))
    stream = await a.open(b.peer_id, SINK, SOON)
    started = now()
    transfer = asyncio.create_task(send(stream, 10 * MB))
    await transfer
    assert 0.9 < now() - started < 1.4


@virtual
async def test_streams_share_an_uplink_and_not_a_downlink() -> None:
    _, (a, b, c) = await swarm(3, Link(bandwidth=10 * MB))
    out = [await a.open(peer.peer_id, SINK, SOON) for peer in (b, c)]
    assert await asyncio.gather(*(send(stream, 10 * MB) for stream in out)) == [about(2.0)] * 2
    into = [await peer.open(a.peer_id, SINK, SOON) for peer in (b, c)]
    assert await asyncio.gather(*(send(stream, 10 * MB) for stream in into)) == [about(1.0)] * 2


@virtual
async def test_a_small_message_does_not_wait_for_a_whole_bulk_transfer() -> None:
    _, (a, b) = await swarm(2, Link(bandwidth=10 * MB), StreamLimits(chunk=MB // 10))
    bulk, small = [await a.open(b.peer_id, SINK, SOON) for _ in range(2)]
    transfer = asyncio.create_task(send(bulk, 100 * MB))
    await asyncio.sleep(1)
    assert await send(small, 100) < 0.05
    await transfer


@virtual
async def test_what_is_bulk_may_take_the_time_of_many_times_as_much() -> None:
    """As when a small model stands for a large one: questions stay as quick as they are."""
    _, (a, b) = await swarm(2, Link(bandwidth=10 * MB, bulk=100), StreamLimits(chunk=2 * BULK_BYTES))
    stream = await a.open(b.peer_id, SINK, SOON)
    assert await send(stream, 100) == close_to((8 + 100 + 1) / (10 * MB))
    bulk = 10 * BULK_BYTES
    assert await send(stream, bulk) == close_to((8 + 100 * bulk + 1) / (10 * MB))


@virtual
async def test_every_pair_may_have_its_own_link() -> None:
    network, (a, b, c) = await swarm(3)
    near = {a.peer_id, b.peer_id}
    network.link = lambda sender, receiver: Link(latency=0.01 if {sender, receiver} == near else 0.2)
    for peer, round_trip in ((b, 0.02), (c, 0.4)):
        stream = await a.open(peer.peer_id, ECHO, SOON)
        started = now()
        await ask(stream, b"ping")
        assert now() - started == close_to(round_trip)


@virtual
async def test_jitter_delays_but_never_reorders() -> None:
    _, (a, b) = await swarm(2, Link(latency=0.01, jitter=0.5))
    stream = await a.open(b.peer_id, ECHO, SOON)
    times = []
    for number in range(50):
        started = now()
        assert await ask(stream, b"%d" % number) == b"%d" % number
        times.append(now() - started)
    assert 0.02 < min(times) < max(times) < 1.1
    assert max(times) - min(times) > 0.3


@virtual
async def test_lossy_links_fail_opens_and_break_streams() -> None:
    _, (a, b) = await swarm(2, Link(open_loss=0.3))
    failures = 0
    for _ in range(1000):
        try:
            (await a.open(b.peer_id, ECHO, SOON)).close()
        except PeerUnreachable:
            failures += 1
    assert 250 < failures < 350

    _, (a, b) = await swarm(2, Link(write_loss=0.1))
    survived = 0
    for _ in range(200):
        stream = await a.open(b.peer_id, ECHO, SOON)
        try:
            while True:
                await ask(stream, b"x")
                survived += 1
        except PeerUnreachable:
            stream.close()
    assert 2.5 < survived / 200 < 6.5  # two writes each turn: 0.81 / 0.19 turns are expected


# --- faults


@virtual
async def test_the_dead_may_come_back_as_themselves() -> None:
    network, (a, b) = await swarm(2)
    assert await b.put(KEY, b"before", 600, SOON)
    network.kill(b.peer_id)
    with pytest.raises(TransportDown):
        await b.get(KEY, SOON)
    assert await a.peers() == []
    again = MemoryTransport(network, Identity.from_seed("memory", 1))
    await again.start()
    assert await again.get(KEY, SOON) == []  # it knows nobody yet
    assert await again.connect(a.addresses(), SOON) == [a.peer_id]
    assert [record.value for record in await again.get(KEY, SOON)] == [b"before"]


@virtual
async def test_the_same_key_cannot_run_twice() -> None:
    network, (a, *_) = await swarm(1)
    with pytest.raises(UserError, match=a.peer_id):
        await MemoryTransport(network, Identity.from_seed("memory", 0)).start()


@virtual
async def test_records_of_the_dead_expire() -> None:
    network, (a, b) = await swarm(2)
    assert await b.put(KEY, b"b", 60, SOON)
    network.kill(b.peer_id)
    await asyncio.sleep(59)
    assert len(await a.get(KEY, SOON)) == 1
    await asyncio.sleep(2)
    assert await a.get(KEY, SOON) == []


@virtual
async def test_a_frozen_peer_does_nothing_until_it_thaws() -> None:
    network, (a, b, c) = await swarm(3, Link(latency=0.01))
    stream = await a.open(b.peer_id, ECHO, SOON)
    network.freeze(b.peer_id)
    with pytest.raises(DeadlineExceeded):
        await a.open(b.peer_id, ECHO, 10)
    with pytest.raises(DeadlineExceeded):
        await b.open(c.peer_id, ECHO, 10)
    assert not await b.put(KEY, b"", 60, 10)
    assert await b.get(KEY, 10) == []
    assert await c.connect(b.addresses(), 10) == []
    waiting = asyncio.create_task(ask(stream, b"patience"))
    await asyncio.sleep(1000)
    assert not waiting.done()
    network.thaw(b.peer_id)
    assert await waiting == b"patience"
    assert await b.put(KEY, b"", 60, 10)


@virtual
async def test_a_partition_divides_streams_and_records_until_it_heals() -> None:
    network, (a, b, c, d) = await swarm(4, Link(latency=0.01))
    assert await a.put(KEY, b"old", 3000, SOON)
    across, within = await a.open(c.peer_id, ECHO, SOON), await a.open(b.peer_id, ECHO, SOON)
    network.partition([a.peer_id, b.peer_id])  # the others form the second group
    assert await ask(within, b"near") == b"near"
    waiting = asyncio.create_task(ask(across, b"far"))
    with pytest.raises(DeadlineExceeded):
        await a.open(c.peer_id, ECHO, 10)
    assert await a.put(KEY, b"new", 3100, SOON)
    assert await c.put(KEY, b"c", 3000, SOON)
    assert [record.value for record in await b.get(KEY, SOON)] == [b"new"]
    assert {record.value for record in await d.get(KEY, SOON)} == {b"old", b"c"}
    assert not waiting.done()
    network.heal()
    assert await waiting == b"far"
    for peer in (a, b, c, d):
        assert {record.value for record in await peer.get(KEY, SOON)} == {b"new", b"c"}


@virtual
async def test_a_second_partition_replaces_the_first() -> None:
    network, (a, b, c) = await swarm(3)
    network.partition([a.peer_id])
    network.partition([b.peer_id])
    (await a.open(c.peer_id, ECHO, SOON)).close()
    with pytest.raises(DeadlineExceeded):
        await a.open(b.peer_id, ECHO, SOON)
    network.kill(b.peer_id)
    network.heal()
    assert await a.put(KEY, b"a", 60, SOON)
    assert len(await c.get(KEY, SOON)) == 1


@virtual
async def test_a_wrong_clock_makes_records_early_or_late() -> None:
    network, (a, b) = await swarm(2)
    network.skew(b.peer_id, 7200)
    assert b.now() - a.now() == close_to(7200)
    assert not await b.put(KEY, b"from the future", 600, SOON)
    assert await a.put(KEY, b"a", 600, SOON)
    assert await b.get(KEY, SOON) == []  # expired long ago, as b sees it
    network.skew(b.peer_id, -30)
    assert len(await b.get(KEY, SOON)) == 1


@virtual
async def test_a_clock_that_was_ahead_and_is_set_right_is_seen_again_at_once() -> None:
    network, (a, b) = await swarm(2)
    assert await b.put(KEY, b"before", 60, SOON)
    network.skew(b.peer_id, 7200)
    assert not await b.put(KEY, b"from the future", 60, SOON)
    await asyncio.sleep(30)
    network.skew(b.peer_id, 0)
    assert await b.put(KEY, b"set right", 60, SOON)
    (record,) = await a.get(KEY, SOON)
    assert record.value == b"set right"
    assert record.expires == close_to(a.now() + 60)


@virtual
async def test_strangers_do_not_see_each_other_s_records() -> None:
    network, (a, b) = await swarm(2)
    stranger, other = [
        MemoryTransport(network, Identity.from_seed("stranger", number)) for number in range(2)
    ]
    await stranger.start()
    await other.start()
    assert await stranger.put(KEY, b"s", 60, SOON)
    assert await a.put(KEY, b"a", 60, SOON)
    assert [record.value for record in await b.get(KEY, SOON)] == [b"a"]
    assert await other.connect(stranger.addresses(), SOON)
    assert await other.connect(b.addresses(), SOON)
    for peer in (a, stranger):
        assert {record.value for record in await peer.get(KEY, SOON)} == {b"a", b"s"}


@virtual
async def test_closed_streams_leave_nothing_behind() -> None:
    _, (a, b) = await swarm(2)
    for _ in range(10):
        stream = await a.open(b.peer_id, ECHO, SOON)
        await ask(stream, b"x")
        stream.close()
    (await a.open(b.peer_id, ECHO, SOON)).break_off()  # type: ignore[attr-defined]
    await asyncio.sleep(1)
    assert "Streams: 0 open" in repr(a)
    assert "Streams: 0 open, 0 answered" in repr(b)


# --- determinism and size


def story(seed: int) -> list[tuple[float, str]]:
    """What happens in a busy, lossy swarm with faults, as a list of events."""
    events: list[tuple[float, str]] = []

    async def chat(peer: MemoryTransport, others: list[PeerId]) -> None:
        for turn in range(6):
            other = others[(turn * 7 + len(events)) % len(others)]
            try:
                stream = await peer.open(other, ECHO, 2.0)
                answer = await asyncio.wait_for(ask(stream, bytes(1000 * turn)), 2.0)
                events.append((now(), f"{peer.peer_id} {other} {len(answer)}"))
                stream.close()
            except (PeerUnreachable, DeadlineExceeded, TransportDown, TimeoutError) as error:
                events.append((now(), f"{peer.peer_id} {other} {type(error).__name__}"))
            if peer.peer_id not in dead:
                await peer.put(KEY, b"%d" % turn, 30, 2.0)
                events.append((now(), " ".join(record.subkey for record in await peer.get(KEY, 2.0))))

    dead: set[PeerId] = set()

    async def main() -> None:
        link = Link(latency=0.05, bandwidth=1e5, jitter=0.05, write_loss=0.02)
        network, peers = await swarm(12, link, seed=seed)
        ids = [peer.peer_id for peer in peers]
        chats = [asyncio.create_task(chat(peer, [i for i in ids if i != peer.peer_id])) for peer in peers]
        await asyncio.sleep(1)
        network.freeze(ids[3])
        network.partition(ids[:4], ids[4:])
        await asyncio.sleep(3)
        dead.add(ids[5])
        network.kill(ids[5])
        network.heal()
        network.thaw(ids[3])
        for outcome in await asyncio.gather(*chats, return_exceptions=True):
            assert outcome is None or isinstance(outcome, TransportDown)

    run_virtual(main())
    return events


def test_the_same_seed_tells_the_same_story() -> None:
    events = [event for _, event in story(1)]
    for outcome in ("1000", "PeerUnreachable", "DeadlineExceeded"):
        assert any(event.endswith(outcome) for event in events)
    assert story(1) == story(1)
    assert story(1) != story(2)


@virtual
async def test_a_thousand_peers_meet_and_talk() -> None:
    _, peers = await swarm(1000, Link(latency=0.05, bandwidth=10 * MB))

    async def visit(index: int) -> None:
        peer, other = peers[index], peers[(index * 37 + 11) % len(peers)]
        assert await peer.put(f"{KEY}/{index % 50}", b"here", 60, SOON)
        if other is not peer:
            stream = await peer.open(other.peer_id, SINK, SOON)
            await send(stream, 100_000)
            stream.close()

    await asyncio.gather(*(visit(index) for index in range(1000)))
    assert len(await peers[999].get(f"{KEY}/7", SOON)) == 20
