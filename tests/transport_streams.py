"""What every transport's streams must do, in order, under load and when they are cut short."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import PeerUnreachable
from protocol.ground import PeerId
from protocol.transport.base import Stream
from tests.transport_network import (
    DEADLINE,
    ECHO,
    PATIENCE,
    Network,
    OnNetwork,
    ask,
    echo,
    on_network,
)


class Streams(OnNetwork):
    """Bytes between two peers."""

    @on_network
    async def test_a_stream_carries_bytes_both_ways(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        assert await ask(stream, b"hello") == b"hello"
        assert await ask(stream, b"") == b""
        assert await ask(stream, b"again") == b"again"
        stream.close()

    @on_network
    async def test_what_is_written_ahead_arrives_with_the_opening(self, network: Network) -> None:
        a, b = await network.pair()
        for data in (b"hello", b"x" * (1 << 20)):
            stream = await a.open(b.peer_id, ECHO, DEADLINE, ahead=True)
            assert await ask(stream, data) == data
            assert await ask(stream, b"again") == b"again"
            stream.close()

    @on_network
    async def test_a_stream_that_was_opened_ahead_and_closed_arrives_all_the_same(
        self, network: Network
    ) -> None:
        a, b = await network.pair()
        seen: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            seen.set_result(bytes(await stream.read(5)))

        await b.serve("/noloco/test/once", handler)
        stream = await a.open(b.peer_id, "/noloco/test/once", DEADLINE, ahead=True)
        await stream.write(b"hello")
        stream.close()
        assert await asyncio.wait_for(seen, PATIENCE) == b"hello"

    @on_network
    async def test_both_ends_know_who_the_other_is(self, network: Network) -> None:
        a, b = await network.pair()
        seen: asyncio.Future[PeerId] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            seen.set_result(stream.remote)

        await b.serve("/noloco/test/who", handler)
        stream = await a.open(b.peer_id, "/noloco/test/who", DEADLINE)
        assert stream.remote == b.peer_id
        assert await asyncio.wait_for(seen, PATIENCE) == a.peer_id
        stream.close()

    @on_network
    async def test_a_peer_that_was_dialled_can_open_streams_to_the_dialler(self, network: Network) -> None:
        a, b = await network.pair()
        await a.serve(ECHO, echo)
        stream = await b.open(a.peer_id, ECHO, DEADLINE)
        assert await ask(stream, b"back") == b"back"
        stream.close()

    @on_network
    async def test_a_peer_is_reached_at_the_addresses_in_its_record(self, network: Network) -> None:
        """Nobody introduced the two; the record of a is all that c has."""
        a, c = await network.peer("a"), await network.peer("c")
        await a.serve(ECHO, echo)
        c.learn(a.peer_id, ["nonsense", "/ip4/127.0.0.1/tcp/9/p2p/" + a.peer_id, *a.addresses()])
        stream = await c.open(a.peer_id, ECHO, DEADLINE)
        assert await ask(stream, b"found") == b"found"
        stream.close()

    @on_network
    async def test_many_streams_at_once_do_not_mix(self, network: Network) -> None:
        a, b = await network.pair()

        async def one(number: int) -> None:
            stream = await a.open(b.peer_id, ECHO, DEADLINE)
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
        stream = await a.open(b.peer_id, "/noloco/test/bulk", DEADLINE)
        buffer = bytearray(size)
        for number in range(5):
            buffer[:] = bytes([number, 255 - number]) * (size // 2)
            await stream.write(memoryview(buffer))
        buffer[:] = bytes(size)
        parts = await asyncio.wait_for(got, PATIENCE)
        for number, part in enumerate(parts):
            assert part == bytes([number, 255 - number]) * (size // 2)
        stream.close()

    @on_network
    async def test_buffers_of_all_kinds_arrive_in_order(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        words = memoryview(bytearray(range(16))).cast("I")  # items of four bytes each
        await stream.write((24).to_bytes(8, "big"), b"", bytearray(b"abcd"), words, memoryview(b""), b"efgh")
        assert await stream.read(8 + 24) == (24).to_bytes(8, "big") + b"abcd" + bytes(range(16)) + b"efgh"
        assert await stream.read(0) == b""
        stream.close()

    @on_network
    async def test_writes_of_several_tasks_do_not_mix(self, network: Network) -> None:
        a, b = await network.pair()
        size = 3 << 20
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
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
        stream = await a.open(b.peer_id, "/noloco/test/closing", DEADLINE)
        assert await asyncio.wait_for(stream.read(size), PATIENCE) == b"x" * size
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), PATIENCE)
        stream.close()

    @on_network
    async def test_a_handler_that_fails_closes_its_stream(self, network: Network) -> None:
        a, b = await network.pair()

        async def handler(stream: Stream) -> None:
            raise RuntimeError("the handler is broken, as this test wants")

        await b.serve("/noloco/test/broken", handler)
        stream = await a.open(b.peer_id, "/noloco/test/broken", DEADLINE)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), PATIENCE)
        stream.close()
        other = await a.open(b.peer_id, ECHO, DEADLINE)
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
        stream = await a.open(b.peer_id, "/noloco/test/end", DEADLINE)
        stream.close()
        stream.close()
        assert await asyncio.wait_for(ended, PATIENCE)
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
        stream = await a.open(b.peer_id, "/noloco/test/slow", DEADLINE)
        write = asyncio.create_task(stream.write(bytes(total)))
        assert not (await asyncio.wait([write], timeout=1.0))[0]
        go.set()
        await asyncio.wait_for(write, PATIENCE)
        assert await stream.read(1) == b"!"
        stream.close()

    @on_network
    async def test_a_cancelled_read_loses_nothing(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        await stream.write((4).to_bytes(8, "big"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read(12), 0.3)
        await stream.write(b"data")
        assert await asyncio.wait_for(stream.read(12), PATIENCE) == (4).to_bytes(8, "big") + b"data"
        stream.close()

    @on_network
    async def test_a_cancelled_write_breaks_its_stream(self, network: Network) -> None:
        a, b = await network.pair()

        async def handler(stream: Stream) -> None:
            await asyncio.sleep(DEADLINE)

        await b.serve("/noloco/test/never", handler)
        stream = await a.open(b.peer_id, "/noloco/test/never", DEADLINE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.write(bytes(96 << 20)), 0.3)
        with pytest.raises(PeerUnreachable):
            await stream.write(b"the rest would be misread")
        stream.close()
