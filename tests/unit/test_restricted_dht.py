"""The DHT of a private run: what `restrict` sets is what decides, on our own types and without a process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from protocol.access.admission import Admission
from protocol.records.identity import Identity
from protocol.supervision import Supervisor
from protocol.transport.dht import Dht, RecordValidator
from protocol.transport.dht_guard import GuardedProtocol
from protocol.transport.hivemind_api import PeerID
from tests.unit.test_tokens import signed

ME = Identity.from_seed("me").peer_id
STRANGER = PeerID.from_base58(Identity.from_seed("stranger").peer_id)


def dht_of_one() -> tuple[Dht, GuardedProtocol]:
    guarded = GuardedProtocol.__new__(GuardedProtocol)
    guarded.record_validator = RecordValidator(time.time)
    node: Any = SimpleNamespace(protocol=guarded, blacklist=set())
    return Dht(node, False, time.time, Supervisor()), guarded


def test_a_restricted_dht_lets_no_stranger_in() -> None:
    dht, guarded = dht_of_one()
    assert guarded._lets_in(STRANGER, b"")
    admission = Admission(signed(), ME, time.time)
    dht.restrict(admission)
    assert guarded.admission is guarded.record_validator.admission is admission
    assert not guarded._lets_in(STRANGER, b"")


def test_what_a_peer_is_refused_by_and_counted_by_is_what_was_given() -> None:
    dht, guarded = dht_of_one()

    async def refuses(peer: object) -> bool:
        return True

    async def network(peer: object) -> str:
        return "network"

    dht.refuse_by(refuses)
    dht.locate_by(network)
    assert (guarded.refuses, guarded.network) == (refuses, network)
