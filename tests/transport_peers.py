"""What every transport must do about peers that die, freeze, leave or come late."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from protocol.errors import DeadlineExceeded, PeerUnreachable, TransportDown, UserError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.transport.base import Stream
from tests.transport_network import (
    DEADLINE,
    ECHO,
    KEY,
    PATIENCE,
    Network,
    OnNetwork,
    ask,
    keep_writing,
    on_network,
)


class Peers(OnNetwork):
    """Who is there, who is not any more, and the end."""

    @on_network
    async def test_opening_what_nobody_serves_fails_at_once(self, network: Network) -> None:
        a, b = await network.pair()
        with pytest.raises(PeerUnreachable):
            await a.open(b.peer_id, "/noloco/test/nothing", DEADLINE)
        with pytest.raises(PeerUnreachable):
            await a.open(Identity.from_seed("nobody").peer_id, ECHO, DEADLINE)
        with pytest.raises(PeerUnreachable):
            await a.open(a.peer_id, ECHO, DEADLINE)

    @on_network
    async def test_what_nobody_serves_fails_at_the_first_read_of_a_stream_opened_ahead(
        self, network: Network
    ) -> None:
        a, b = await network.pair()

        async def read_of(peer: PeerId, protocol: str) -> None:
            stream = await a.open(peer, protocol, DEADLINE, ahead=True)
            try:
                await stream.read(1)
            finally:
                stream.close()

        for peer, protocol in (
            (b.peer_id, "/noloco/test/nothing"),
            (Identity.from_seed("nobody").peer_id, ECHO),
            (a.peer_id, ECHO),
        ):
            with pytest.raises(PeerUnreachable):
                await asyncio.wait_for(read_of(peer, protocol), network.at_once)

    @on_network
    async def test_a_frozen_peer_lets_a_stream_opened_ahead_wait(self, network: Network) -> None:
        a, b = await network.pair()
        (await a.open(b.peer_id, ECHO, DEADLINE)).close()
        network.freeze(b)
        stream = await asyncio.wait_for(a.open(b.peer_id, ECHO, DEADLINE, ahead=True), network.at_once)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(stream, b"late"), 0.5)
        network.thaw(b)
        assert await asyncio.wait_for(stream.read(12), PATIENCE) == (4).to_bytes(8, "big") + b"late"
        stream.close()

    @on_network
    async def test_a_peer_that_dies_is_noticed_at_once(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        reading = asyncio.create_task(stream.read(1))
        await asyncio.sleep(0.1)
        network.kill(b)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(reading, network.at_once)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(keep_writing(stream), network.at_once)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(a.open(b.peer_id, ECHO, PATIENCE), network.at_once)
        stream.close()

    @on_network
    async def test_a_frozen_peer_costs_the_deadline_and_no_more(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        network.freeze(b)
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(DeadlineExceeded):
            await a.open(b.peer_id, ECHO, 0.5)
        assert 0.4 < loop.time() - started < network.at_once
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(stream, b"late"), 0.5)
        network.thaw(b)
        assert await asyncio.wait_for(stream.read(12), PATIENCE) == (4).to_bytes(8, "big") + b"late"
        stream.close()

    @on_network
    async def test_connect_returns_who_answered(self, network: Network) -> None:
        a, b, c = await network.peers("abc")
        gone = b.addresses()
        network.kill(b)
        assert await a.connect([*gone, *c.addresses(), *a.addresses()], DEADLINE) == [c.peer_id]
        assert await a.connect(gone, DEADLINE) == []
        assert await a.connect([], DEADLINE) == []

    @on_network
    async def test_a_wrong_address_is_named(self, network: Network) -> None:
        a = await network.peer("a")
        with pytest.raises(UserError, match=r"203\.0\.113\.7:31337"):
            await a.connect(["203.0.113.7:31337"], DEADLINE)

    @on_network
    async def test_peers_lists_who_is_connected_and_how_to_dial_them(self, network: Network) -> None:
        a, b = await network.pair()
        assert [peer for peer, _ in await b.peers()] == [a.peer_id]
        [(peer, addresses)] = await a.peers()
        assert peer == b.peer_id
        c = await network.peer("c")
        assert await c.connect(addresses, DEADLINE) == [b.peer_id]
        assert all(address.endswith(b.peer_id) for address in b.addresses())

    @on_network
    async def test_closing_twice_is_closing_once(self, network: Network) -> None:
        a, b = await network.pair()
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        await b.close()
        await b.close()
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), PATIENCE)
        for call in (
            b.open(a.peer_id, ECHO, DEADLINE),
            b.get(KEY, DEADLINE),
            b.put(KEY, b"", 60, DEADLINE),
            b.peers(),
        ):
            with pytest.raises(TransportDown):
                await call
        with pytest.raises(TransportDown):
            await b.connect(a.addresses(), DEADLINE)
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
        stream = await a.open(b.peer_id, "/noloco/test/goodbye", DEADLINE)
        await stream.write(b"x")
        await asyncio.wait_for(closed.wait(), PATIENCE)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.read(1), PATIENCE)
        stream.close()

    @on_network
    async def test_a_second_handler_replaces_the_first(self, network: Network) -> None:
        a, b = await network.pair()
        served = itertools.count()

        async def other(stream: Stream) -> None:
            await stream.write(b"%d" % next(served))

        await b.serve(ECHO, other)
        stream = await a.open(b.peer_id, ECHO, DEADLINE)
        assert await stream.read(1) == b"0"
        stream.close()
