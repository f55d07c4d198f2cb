"""What a stranger sees of a private run's DHT: real p2pd, on loopback."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from protocol.access.admission import Admission
from protocol.access.revocations import Revocations
from protocol.access.tokens import Token
from protocol.records.identity import Identity
from protocol.records.records import key_digest
from protocol.transport.dht_guard import node_id_of
from protocol.transport.hivemind_api import PeerID, dht_pb2
from protocol.transport.libp2p import Libp2pTransport
from tests.attacks.test_dht import Stranger, record
from tests.real.test_libp2p_transport import OnLoopback
from tests.transport_network import DEADLINE, KEY
from tests.unit.test_tokens import OWNER, RUN, signed


async def a_member(network: OnLoopback, name: str, token: Token | None) -> tuple[Libp2pTransport, Admission]:
    transport = await network.peer(name)
    admission = Admission(signed(), transport.peer_id, transport.now)
    if token is not None:
        admission.own = token.credential(transport.peer_id)
    for other in network.transports[:-1]:
        await transport.connect(other.addresses(), DEADLINE)
    await transport.restrict(admission, DEADLINE)
    return transport, admission


def a_token(uses: int = 9) -> Token:
    return Token.issue(RUN, OWNER, None, uses, time.time() + 600)


async def routed_to(member: Libp2pTransport, other: Libp2pTransport) -> bool:
    await asyncio.sleep(0.5)  # hivemind's table is written in the background
    return other.peer_id in member.neighbours()


async def found_by(stranger: Stranger, member: Libp2pTransport) -> dht_pb2.FindResult:
    (result,) = (await stranger.find(member, [key_digest(KEY)])).results
    return result


async def test_a_stranger_finds_nothing_stores_nothing_and_is_nobodys_neighbour(tmp_path: Path) -> None:
    network = OnLoopback(tmp_path)
    try:
        given = a_token()
        (a, _), (b, _) = [await a_member(network, name, given) for name in ("a", "b")]
        assert await b.put(KEY, b"secret", 600, DEADLINE)
        assert [found.value for found in await a.get(KEY, DEADLINE)] == [b"secret"]
        assert await routed_to(a, b)
        mallory, _ = await a_member(network, "mallory", None)
        stranger = Stranger(mallory)
        stranger.protocol.admission = None  # it asks as it pleases
        result = await found_by(stranger, a)
        assert result.type == dht_pb2.NOT_FOUND
        assert not result.nearest_peer_ids
        answer = await stranger.store(a, [record(Identity.from_seed("suite", "mallory"), KEY)])
        assert list(answer.store_ok) == [False]
        await stranger.ping(a, node_id_of(PeerID.from_base58(mallory.peer_id)).to_bytes())
        assert not await routed_to(a, mallory)
        assert [found.value for found in await a.get(KEY, DEADLINE)] == [b"secret"]
    finally:
        await network.close()


async def test_a_member_that_was_revoked_is_a_stranger(tmp_path: Path) -> None:
    network = OnLoopback(tmp_path)
    try:
        given, bad = a_token(), a_token(1)
        a, admission = await a_member(network, "a", given)
        mallory, _ = await a_member(network, "mallory", bad)
        assert await mallory.put(KEY, b"mine", 600, DEADLINE)
        assert [found.value for found in await a.get(KEY, DEADLINE)] == [b"mine"]
        stranger = Stranger(mallory)
        assert (await found_by(stranger, a)).type == dht_pb2.FOUND_DICTIONARY
        revoked = Revocations(time.time(), frozenset({bad.invitation.serial}))
        assert admission.adopt(revoked.sign(RUN, OWNER))
        assert not await a.get(KEY, DEADLINE)
        assert (await found_by(stranger, a)).type == dht_pb2.NOT_FOUND
        await a.shut_out(mallory.peer_id)
        assert mallory.peer_id not in {peer for peer, _ in await a.peers()}
    finally:
        await network.close()
