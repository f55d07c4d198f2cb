"""What every transport's records must do: found by all, expiring, signed, and no older than what is known."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import RecordError
from protocol.identity import Identity
from protocol.records import MAX_LIFETIME, MAX_RECORD_BYTES, key_digest, seal_record
from tests.transport_network import (
    ECHO,
    KEY,
    SOON,
    Network,
    OnNetwork,
    ask,
    echo,
    on_network,
)


class Records(OnNetwork):
    """The DHT."""

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
