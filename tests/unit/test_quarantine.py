"""Quarantine: after how many offences, for how long, and what is remembered."""

from __future__ import annotations

from node.membership.ledger import MAX_PEERS, OFFENCES, QUARANTINE_SECONDS, Ledger
from protocol.ground import PeerId


def test_repeated_offences_mean_quarantine_that_ends_and_lasts_longer_the_next_time() -> None:
    quarantine, peer = Ledger(), PeerId("x")
    now = 100.0
    for expected in (QUARANTINE_SECONDS, 2 * QUARANTINE_SECONDS, 4 * QUARANTINE_SECONDS):
        began = [quarantine.record_meeting(peer, True, now) for _ in range(OFFENCES)]
        assert began == [False] * (OFFENCES - 1) + [True]
        assert quarantine.is_quarantined(peer, now + expected - 1)
        now += expected
        assert not quarantine.is_quarantined(peer, now)


def test_rare_offences_are_forgiven() -> None:
    quarantine, peer = Ledger(), PeerId("x")
    assert not any(quarantine.record_meeting(peer, number % 3 == 0, 0.0) for number in range(60))


def test_a_quarantine_is_for_one_peer_and_memory_is_bounded() -> None:
    quarantine = Ledger()
    for number in range(MAX_PEERS + 10):
        quarantine.record_meeting(PeerId(str(number)), True, 0.0)
        quarantine.record_meeting(PeerId(f"honest {number}"), False, 0.0)
    assert repr(quarantine) == f"<Ledger [Peers: {MAX_PEERS} remembered]>"
    for _ in range(OFFENCES):
        quarantine.record_meeting(PeerId("bad"), True, 0.0)
    assert quarantine.is_quarantined(PeerId("bad"), 1.0)
    assert not quarantine.is_quarantined(PeerId("5000"), 1.0)
