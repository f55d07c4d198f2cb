"""What every transport must do. Subclasses say how to make a network and which event loop runs it.

Each test is a coroutine that gets a `Network`; `on_network` turns it into a plain function that pytest calls.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import DeadlineExceeded, PeerUnreachable, RecordError, TransportDown, UserError
from protocol.identity import Identity
from protocol.records import MAX_LIFETIME, MAX_RECORD_BYTES, key_digest, seal_record
from protocol.transport.base import PeerId, Stream, Transport

ECHO = "/noloco/test/echo"
KEY = "noloco/test/records"
SOON = 5.0  # seconds; longer than anything here takes, unless something is broken


class Network(abc.ABC):
    """Peers that can be killed and frozen."""

    @abc.abstractmethod
    async def peer(self, name: str) -> Transport:
        """A started transport whose identity follows from `name`; closed at the end of the test."""

    @abc.abstractmethod
    def kill(self, transport: Transport) -> None: ...

    @abc.abstractmethod
    def freeze(self, transport: Transport) -> None: ...

    @abc.abstractmethod
    def thaw(self, transport: Transport) -> None: ...

    @abc.abstractmethod
    async def inject(
        self, through: Transport, digest: bytes, subkey: str, sealed: bytes, expires: float
    ) -> bool:
        """Try to store any bytes as a record, past the checks of `put`; whether some peer took them."""

    async def peers(self, names: str) -> list[Transport]:
        """One peer for each letter."""
        return list(await asyncio.gather(*map(self.peer, names)))

    async def pair(self) -> tuple[Transport, Transport]:
        """Two peers that know each other; the second one serves `ECHO`."""
        a, b = await self.peers("ab")
        await b.serve(ECHO, echo)
        assert await a.connect(b.addresses(), SOON) == [b.peer_id]
        return a, b


async def echo(stream: Stream) -> None:
    """Send back what comes: eight bytes of length, then that much."""
    while True:
        size = int.from_bytes(await stream.read(8), "big")
        await stream.write(size.to_bytes(8, "big"), await stream.read(size))


async def ask(stream: Stream, data: bytes) -> bytes:
    await stream.write(len(data).to_bytes(8, "big"), data)
    return await stream.read(int.from_bytes(await stream.read(8), "big"))


async def eventually(condition: Callable[[], Awaitable[object]], within: float = SOON) -> None:
    """Until `condition` holds; asks it 50 times a second."""
    async with asyncio.timeout(within):
        while not await condition():  # noqa: ASYNC110 - what happens in another process sets no event here
            await asyncio.sleep(0.02)


async def keep_writing(stream: Stream) -> None:
    while True:
        await stream.write(b"x")
        await asyncio.sleep(0.01)


def on_network(
    test: Callable[[TransportSuite, Network], Coroutine[Any, Any, None]],
) -> Callable[[TransportSuite, Path], None]:
    def run(self: TransportSuite, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.network(tmp_path) as network:
                await test(self, network)

        self.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class TransportSuite(abc.ABC):
    @abc.abstractmethod
    def run(self, main: Coroutine[Any, Any, None]) -> None: ...

    @abc.abstractmethod
    def network(self, folder: Path) -> AbstractAsyncContextManager[Network]: ...

    # --- streams

    @on_network
    async def test_a_stream_carries_bytes_both_ways(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, SOON)
        assert await ask(stream, b"hello") == b"hello"
        assert await ask(stream, b"") == b""
        assert await ask(stream, b"again") == b"again"
        stream.close()

    @on_network
    async def test_both_ends_know_who_the_other_is(self, network: Network) -> None:
        a, b = await network.pair()
        seen: asyncio.Future[PeerId] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            seen.set_result(stream.remote)

        await b.serve("/noloco/test/who", handler)
        stream = await a.open(b.peer_id, "/noloco/test/who", SOON)
        assert stream.remote == b.peer_id
        assert await asyncio.wait_for(seen, SOON) == a.peer_id
        stream.close()

    @on_network
    async def test_a_peer_that_was_dialled_can_open_streams_to_the_dialler(self, network: Network) -> None:
        a, b = await network.pair()
        await a.serve(ECHO, echo)
        stream = await b.open(a.peer_id, ECHO, SOON)
        assert await ask(stream, b"back") == b"back"
        stream.close()

    @on_network
    async def test_a_peer_is_reached_at_the_addresses_in_its_record(self, network: Network) -> None:
        """Nobody introduced the two; the record of a is all that c has."""
        a, c = await network.peer("a"), await network.peer("c")
        await a.serve(ECHO, echo)
        c.learn(a.peer_id, ["nonsense", "/ip4/127.0.0.1/tcp/9/p2p/" + a.peer_id, *a.addresses()])
        stream = await c.open(a.peer_id, ECHO, SOON)
        assert await ask(stream, b"found") == b"found"
        stream.close()

    @on_network
    async def test_many_streams_at_once_do_not_mix(self, network: Network) -> None:
        a, b = await network.pair()

        async def one(number: int) -> None:
            stream = await a.open(b.peer_id, ECHO, SOON)
            for turn in range(5):
                data = bytes([number, turn]) * 3000
                assert await ask(stream, data) == data
            stream.close()

        await asyncio.gather(*(one(number) for number in range(40)))

    @on_network
    async def test_fifty_megabytes_arrive_as_they_were_when_written(self, network: Network) -> None:
        a, b = await network.pair()
        size = 10 << 20
        got: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            got.set_result([await stream.read(size) for _ in range(5)])

        await b.serve("/noloco/test/bulk", handler)
        stream = await a.open(b.peer_id, "/noloco/test/bulk", SOON)
        buffer = bytearray(size)
        for number in range(5):
            buffer[:] = bytes([number, 255 - number]) * (size // 2)
            await stream.write(memoryview(buffer))
        buffer[:] = bytes(size)
        parts = await asyncio.wait_for(got, 20)
        for number, part in enumerate(parts):
            assert part == bytes([number, 255 - number]) * (size // 2)
        stream.close()

    @on_network
    async def test_buffers_of_all_kinds_arrive_in_order(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, SOON)
        words = memoryview(bytearray(range(16))).cast("I")  # items of four bytes each
        await stream.write((24).to_bytes(8, "big"), b"", bytearray(b"abcd"), words, memoryview(b""), b"efgh")
        assert await stream.read(8 + 24) == (24).to_bytes(8, "big") + b"abcd" + bytes(range(16)) + b"efgh"
        assert await stream.read(0) == b""
        stream.close()

    @on_network
    async def test_writes_of_several_tasks_do_not_mix(self, network: Network) -> None:
        a, b = await network.pair()
        size = 3 << 20
        stream = await a.open(b.peer_id, ECHO, SOON)
        head = (3 * size).to_bytes(8, "big")
        await stream.write(head)
        writes = [asyncio.create_task(stream.write(bytes([number]) * size)) for number in range(3)]
        assert await stream.read(8) == head
        for number in range(3):
            assert await stream.read(size) == bytes([number]) * size
        await asyncio.gather(*writes)
        stream.close()

    @on_network
    async def test_what_was_written_before_closing_arrives(self, network: Network) -> None:
        a, b = await network.pair()
        size = 2 << 20

        async def handler(stream: Stream) -> None:
            await stream.write(b"x" * size)

        await b.serve("/noloco/test/closing", handler)
        stream = await a.open(b.peer_id, "/noloco/test/closing", SOON)
        assert await asyncio.wait_for(stream.read(size), SOON) == b"x" * size
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), SOON)
        stream.close()

    @on_network
    async def test_a_handler_that_fails_closes_its_stream(self, network: Network) -> None:
        a, b = await network.pair()

        async def handler(stream: Stream) -> None:
            raise RuntimeError("the handler is broken, as this test wants")

        await b.serve("/noloco/test/broken", handler)
        stream = await a.open(b.peer_id, "/noloco/test/broken", SOON)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), SOON)
        stream.close()
        other = await a.open(b.peer_id, ECHO, SOON)
        assert await ask(other, b"still here") == b"still here"
        other.close()

    @on_network
    async def test_a_closed_stream_refuses_and_the_other_end_notices(self, network: Network) -> None:
        a, b = await network.pair()
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            with pytest.raises(PeerUnreachable):
                await stream.read(1)
            ended.set_result(True)

        await b.serve("/noloco/test/end", handler)
        stream = await a.open(b.peer_id, "/noloco/test/end", SOON)
        stream.close()
        stream.close()
        assert await asyncio.wait_for(ended, SOON)
        with pytest.raises(PeerUnreachable):
            await stream.write(b"x")
        with pytest.raises(PeerUnreachable):
            await stream.read(1)

    @on_network
    async def test_a_writer_waits_for_a_reader_that_does_not_read(self, network: Network) -> None:
        a, b = await network.pair()
        go = asyncio.Event()
        total = 96 << 20

        async def handler(stream: Stream) -> None:
            await go.wait()
            for _ in range(total >> 20):
                await stream.read(1 << 20)
            await stream.write(b"!")

        await b.serve("/noloco/test/slow", handler)
        stream = await a.open(b.peer_id, "/noloco/test/slow", SOON)
        write = asyncio.create_task(stream.write(bytes(total)))
        assert not (await asyncio.wait([write], timeout=1.0))[0]
        go.set()
        await asyncio.wait_for(write, 20)
        assert await stream.read(1) == b"!"
        stream.close()

    @on_network
    async def test_a_cancelled_read_loses_nothing(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, SOON)
        await stream.write((4).to_bytes(8, "big"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read(12), 0.3)
        await stream.write(b"data")
        assert await asyncio.wait_for(stream.read(12), SOON) == (4).to_bytes(8, "big") + b"data"
        stream.close()

    @on_network
    async def test_a_cancelled_write_breaks_its_stream(self, network: Network) -> None:
        a, b = await network.pair()

        async def handler(stream: Stream) -> None:
            await asyncio.sleep(SOON)

        await b.serve("/noloco/test/never", handler)
        stream = await a.open(b.peer_id, "/noloco/test/never", SOON)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.write(bytes(96 << 20)), 0.3)
        with pytest.raises(PeerUnreachable):
            await stream.write(b"the rest would be misread")
        stream.close()

    # --- peers that are not there

    @on_network
    async def test_opening_what_nobody_serves_fails_at_once(self, network: Network) -> None:
        a, b = await network.pair()
        with pytest.raises(PeerUnreachable):
            await a.open(b.peer_id, "/noloco/test/nothing", SOON)
        with pytest.raises(PeerUnreachable):
            await a.open(Identity.from_seed("nobody").peer_id, ECHO, SOON)
        with pytest.raises(PeerUnreachable):
            await a.open(a.peer_id, ECHO, SOON)

    @on_network
    async def test_a_peer_that_dies_is_noticed_at_once(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, SOON)
        reading = asyncio.create_task(stream.read(1))
        await asyncio.sleep(0.1)
        network.kill(b)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(reading, 2.0)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(keep_writing(stream), 2.0)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(a.open(b.peer_id, ECHO, SOON), 2.0)
        stream.close()

    @on_network
    async def test_a_frozen_peer_costs_the_deadline_and_no_more(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, SOON)
        network.freeze(b)
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(DeadlineExceeded):
            await a.open(b.peer_id, ECHO, 0.5)
        assert 0.4 < loop.time() - started < 2.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(stream, b"late"), 0.5)
        network.thaw(b)
        assert await asyncio.wait_for(stream.read(12), SOON) == (4).to_bytes(8, "big") + b"late"
        stream.close()

    @on_network
    async def test_connect_returns_who_answered(self, network: Network) -> None:
        a, b, c = await network.peers("abc")
        gone = b.addresses()
        network.kill(b)
        assert await a.connect([*gone, *c.addresses(), *a.addresses()], SOON) == [c.peer_id]
        assert await a.connect(gone, SOON) == []
        assert await a.connect([], SOON) == []

    @on_network
    async def test_a_wrong_address_is_named(self, network: Network) -> None:
        a = await network.peer("a")
        with pytest.raises(UserError, match=r"203\.0\.113\.7:31337"):
            await a.connect(["203.0.113.7:31337"], SOON)

    @on_network
    async def test_peers_lists_who_is_connected_and_how_to_dial_them(self, network: Network) -> None:
        a, b = await network.pair()
        assert [peer for peer, _ in await b.peers()] == [a.peer_id]
        [(peer, addresses)] = await a.peers()
        assert peer == b.peer_id
        c = await network.peer("c")
        assert await c.connect(addresses, SOON) == [b.peer_id]
        assert all(address.endswith(b.peer_id) for address in b.addresses())

    # --- records

    @on_network
    async def test_records_are_found_by_all_and_sorted(self, network: Network) -> None:
        peers = await network.peers("abc")
        for peer in peers[1:]:
            await peer.connect(peers[0].addresses(), SOON)
        for peer in peers:
            assert await peer.put(KEY, peer.peer_id.encode(), 60, SOON)
        for peer in peers:
            records = await peer.get(KEY, SOON)
            assert [record.subkey for record in records] == sorted(peer.peer_id for peer in peers)
            assert all(record.value == record.subkey.encode() for record in records)
            assert all(50 < record.expires - peer.now() <= 61 for record in records)
        assert await peers[0].get(KEY + "/other", SOON) == []

    @on_network
    async def test_a_later_put_replaces_an_earlier_one(self, network: Network) -> None:
        a, b = await network.pair()
        for number in range(3):
            assert await a.put(KEY, b"%d" % number, 60 - 10 * number, SOON)
            assert [record.value for record in await b.get(KEY, SOON)] == [b"%d" % number]

    @on_network
    async def test_records_expire(self, network: Network) -> None:
        a, b = await network.pair()
        assert await a.put(KEY, b"short", 1.0, SOON)
        assert await b.put(KEY, b"long", 30.0, SOON)
        assert len(await b.get(KEY, SOON)) == 2
        await asyncio.sleep(1.2)
        assert [record.value for record in await b.get(KEY, SOON)] == [b"long"]
        assert [record.value for record in await a.get(KEY, SOON)] == [b"long"]

    @on_network
    async def test_records_outlive_their_author(self, network: Network) -> None:
        a, b, c = await network.peers("abc")
        await b.connect(a.addresses(), SOON)
        await c.connect(a.addresses(), SOON)
        assert await b.put(KEY, b"testament", 60, SOON)
        network.kill(b)
        assert [record.value for record in await c.get(KEY, 10.0)] == [b"testament"]

    @on_network
    async def test_a_record_that_would_be_refused_is_not_sent(self, network: Network) -> None:
        a, _ = await network.pair()
        with pytest.raises(RecordError):
            await a.put(KEY, b"", MAX_LIFETIME + 60, SOON)
        with pytest.raises(RecordError):
            await a.put(KEY, bytes(MAX_RECORD_BYTES), 60, SOON)
        with pytest.raises(RecordError):
            await a.put("elsewhere", b"", 60, SOON)
        with pytest.raises(RecordError):
            await a.put(KEY, b"", -1, SOON)

    @on_network
    async def test_forged_records_are_refused(self, network: Network) -> None:
        a, b = await network.pair()
        victim, forger = Identity.from_seed("victim"), Identity.from_seed("forger")
        digest, expires = key_digest(KEY), a.now() + 60
        right = seal_record(victim, KEY, b"right", expires)
        endless = a.now() + 1e6
        for subkey, sealed, until in (
            (victim.peer_id, seal_record(forger, KEY, b"forged", expires), expires),
            (victim.peer_id, right, expires + 1),
            (forger.peer_id, right, expires),
            (victim.peer_id, seal_record(victim, KEY + "/else", b"moved", expires), expires),
            (victim.peer_id, seal_record(victim, KEY, b"endless", endless), endless),
            (victim.peer_id, b"garbage", expires),
            ("garbage", right, expires),
        ):
            assert not await network.inject(a, digest, subkey, sealed, until)
        assert await b.get(KEY, SOON) == []
        assert await network.inject(a, digest, victim.peer_id, right, expires)
        assert [record.value for record in await b.get(KEY, SOON)] == [b"right"]

    @on_network
    async def test_a_replayed_record_does_not_replace_a_newer_one(self, network: Network) -> None:
        a, b = await network.pair()
        author = Identity.from_seed("author")
        old, new = a.now() + 1.0, a.now() + 60
        before = seal_record(author, KEY, b"before", old)
        assert await network.inject(a, key_digest(KEY), author.peer_id, before, old)
        after = seal_record(author, KEY, b"after", new)
        assert await network.inject(a, key_digest(KEY), author.peer_id, after, new)
        assert not await network.inject(a, key_digest(KEY), author.peer_id, before, old)
        assert [record.value for record in await b.get(KEY, SOON)] == [b"after"]
        await asyncio.sleep(1.2)  # until the replayed one is over
        assert [record.value for record in await b.get(KEY, SOON)] == [b"after"]

    @on_network
    async def test_any_member_lets_newcomers_in_after_the_first_one_died(self, network: Network) -> None:
        seed, b, c = await network.peers("abc")
        await b.connect(seed.addresses(), SOON)
        await c.connect(seed.addresses(), SOON)
        assert await b.put(KEY, b"b", 60, SOON)
        network.kill(seed)
        newcomer = await network.peer("d")
        assert await newcomer.connect(c.addresses(), SOON) == [c.peer_id]
        assert [record.value for record in await newcomer.get(KEY, 10.0)] == [b"b"]
        assert await newcomer.put(KEY, b"d", 60, 10.0)
        assert {record.value for record in await b.get(KEY, 10.0)} == {b"b", b"d"}
        await b.serve(ECHO, echo)
        stream = await newcomer.open(b.peer_id, ECHO, SOON)
        assert await ask(stream, b"found through c") == b"found through c"
        stream.close()

    # --- the end

    @on_network
    async def test_closing_twice_is_closing_once(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, SOON)
        await b.close()
        await b.close()
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), SOON)
        for call in (b.open(a.peer_id, ECHO, SOON), b.get(KEY, SOON), b.put(KEY, b"", 60, SOON), b.peers()):
            with pytest.raises(TransportDown):
                await call
        with pytest.raises(TransportDown):
            await b.connect(a.addresses(), SOON)
        stream.close()

    @on_network
    async def test_a_handler_may_close_the_transport(self, network: Network) -> None:
        a, b = await network.pair()
        closed = asyncio.Event()

        async def handler(stream: Stream) -> None:
            await stream.read(1)
            await b.close()
            closed.set()

        await b.serve("/noloco/test/goodbye", handler)
        stream = await a.open(b.peer_id, "/noloco/test/goodbye", SOON)
        await stream.write(b"x")
        await asyncio.wait_for(closed.wait(), SOON)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), SOON)
        stream.close()

    @on_network
    async def test_a_second_handler_replaces_the_first(self, network: Network) -> None:
        a, b = await network.pair()
        served = itertools.count()

        async def other(stream: Stream) -> None:
            await stream.write(b"%d" % next(served))

        await b.serve(ECHO, other)
        stream = await a.open(b.peer_id, ECHO, SOON)
        assert await stream.read(1) == b"0"
        stream.close()
