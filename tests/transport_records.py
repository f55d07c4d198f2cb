"""What every transport's records must do: found by all, expiring, signed, and no older than what is known."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import RecordError
from protocol.records.identity import Identity
from protocol.records.records import MAX_LIFETIME, MAX_RECORD_BYTES, key_digest, seal_record
from tests.patience import patience
from tests.transport_network import (
    DEADLINE,
    ECHO,
    KEY,
    Network,
    OnNetwork,
    ask,
    echo,
    on_network,
)

LIFETIME = patience(10.0)  # of a short-lived record, in which a busy machine does three things


class Records(OnNetwork):
    """The DHT."""

    @on_network
    async def test_records_are_found_by_all_and_sorted(self, network: Network) -> None:
        peers = await network.peers("abc")
        for peer in peers[1:]:
            await peer.connect(peers[0].addresses(), DEADLINE)
        for peer in peers:
            assert await peer.put(KEY, peer.peer_id.encode(), 60, DEADLINE)
        for peer in peers:
            records = await peer.get(KEY, DEADLINE)
            assert [record.subkey for record in records] == sorted(peer.peer_id for peer in peers)
            assert all(record.value == record.subkey.encode() for record in records)
            assert all(50 < record.expires - peer.now() <= 61 for record in records)
        assert await peers[0].get(KEY + "/other", DEADLINE) == []

    @on_network
    async def test_a_later_put_replaces_an_earlier_one(self, network: Network) -> None:
        a, b = await network.pair()
        for number in range(3):
            assert await a.put(KEY, b"%d" % number, 60 - 10 * number, DEADLINE)
            assert [record.value for record in await b.get(KEY, DEADLINE)] == [b"%d" % number]

    @on_network
    async def test_records_expire(self, network: Network) -> None:
        a, b = await network.pair()
        assert await a.put(KEY, b"short", LIFETIME, DEADLINE)
        assert await b.put(KEY, b"long", 10 * LIFETIME, DEADLINE)
        assert len(await b.get(KEY, DEADLINE)) == 2
        await asyncio.sleep(LIFETIME + 0.2)
        assert [record.value for record in await b.get(KEY, DEADLINE)] == [b"long"]
        assert [record.value for record in await a.get(KEY, DEADLINE)] == [b"long"]

    @on_network
    async def test_records_outlive_their_author(self, network: Network) -> None:
        a, b, c = await network.peers("abc")
        await b.connect(a.addresses(), DEADLINE)
        await c.connect(a.addresses(), DEADLINE)
        assert await b.put(KEY, b"testament", 60, DEADLINE)
        network.kill(b)
        assert [record.value for record in await c.get(KEY, DEADLINE)] == [b"testament"]

    @on_network
    async def test_a_record_that_would_be_refused_is_not_sent(self, network: Network) -> None:
        a, _ = await network.pair()
        with pytest.raises(RecordError):
            await a.put(KEY, b"", MAX_LIFETIME + 60, DEADLINE)
        with pytest.raises(RecordError):
            await a.put(KEY, bytes(MAX_RECORD_BYTES), 60, DEADLINE)
        with pytest.raises(RecordError):
            await a.put("elsewhere", b"", 60, DEADLINE)
        with pytest.raises(RecordError):
            await a.put(KEY, b"", -1, DEADLINE)

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
        assert await b.get(KEY, DEADLINE) == []
        assert await network.inject(a, digest, victim.peer_id, right, expires)
        assert [record.value for record in await b.get(KEY, DEADLINE)] == [b"right"]

    @on_network
    async def test_a_replayed_record_does_not_replace_a_newer_one(self, network: Network) -> None:
        a, b = await network.pair()
        author = Identity.from_seed("author")
        old, new = a.now() + LIFETIME, a.now() + 10 * LIFETIME
        before = seal_record(author, KEY, b"before", old)
        assert await network.inject(a, key_digest(KEY), author.peer_id, before, old)
        after = seal_record(author, KEY, b"after", new)
        assert await network.inject(a, key_digest(KEY), author.peer_id, after, new)
        assert not await network.inject(a, key_digest(KEY), author.peer_id, before, old)
        assert [record.value for record in await b.get(KEY, DEADLINE)] == [b"after"]
        await asyncio.sleep(LIFETIME + 0.2)  # until the replayed one is over
        assert [record.value for record in await b.get(KEY, DEADLINE)] == [b"after"]

    @on_network
    async def test_any_member_lets_newcomers_in_after_the_first_one_died(self, network: Network) -> None:
        seed, b, c = await network.peers("abc")
        await b.connect(seed.addresses(), DEADLINE)
        await c.connect(seed.addresses(), DEADLINE)
        assert await b.put(KEY, b"b", 60, DEADLINE)
        network.kill(seed)
        newcomer = await network.peer("d")
        assert await newcomer.connect(c.addresses(), DEADLINE) == [c.peer_id]
        assert [record.value for record in await newcomer.get(KEY, DEADLINE)] == [b"b"]
        assert await newcomer.put(KEY, b"d", 60, DEADLINE)
        assert {record.value for record in await b.get(KEY, DEADLINE)} == {b"b", b"d"}
        await b.serve(ECHO, echo)
        stream = await newcomer.open(b.peer_id, ECHO, DEADLINE)
        assert await ask(stream, b"found through c") == b"found through c"
        stream.close()
