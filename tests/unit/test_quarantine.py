"""Quarantine: after how many offences, for how long, and what is remembered."""

from __future__ import annotations

from node.membership.ledger import MAX_PEERS, OFFENCES, QUARANTINE_SECONDS, Ledger
from protocol.ground import PeerId


def test_repeated_offences_mean_quarantine_that_ends_and_lasts_longer_the_next_time() -> None:
    quarantine, peer = Ledger(), PeerId("x")
    now = 100.0
    for expected in (QUARANTINE_SECONDS, 2 * QUARANTINE_SECONDS, 4 * QUARANTINE_SECONDS):
        began = [quarantine.note(peer, True, now) for _ in range(OFFENCES)]
        assert began == [False] * (OFFENCES - 1) + [True]
        assert quarantine.holds(peer, now + expected - 1)
        now += expected
        assert not quarantine.holds(peer, now)


def test_rare_offences_are_forgiven() -> None:
    quarantine, peer = Ledger(), PeerId("x")
    assert not any(quarantine.note(peer, number % 3 == 0, 0.0) for number in range(60))


def test_a_quarantine_is_for_one_peer_and_memory_is_bounded() -> None:
    quarantine = Ledger()
    for number in range(MAX_PEERS + 10):
        quarantine.note(PeerId(str(number)), True, 0.0)
        quarantine.note(PeerId(f"honest {number}"), False, 0.0)
    assert repr(quarantine) == f"<Ledger [Offenders: {MAX_PEERS} remembered | Checked: 0]>"
    for _ in range(OFFENCES):
        quarantine.note(PeerId("bad"), True, 0.0)
    assert quarantine.holds(PeerId("bad"), 1.0)
    assert not quarantine.holds(PeerId("5000"), 1.0)
