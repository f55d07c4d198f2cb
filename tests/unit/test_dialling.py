"""How often others' words make this peer dial: bounded for each peer and in sum, ever more rarely where nobody is."""

from __future__ import annotations

from itertools import pairwise

from protocol.ground import PeerId
from protocol.records.addresses import Whereabouts
from protocol.records.identity import Identity
from protocol.transport.dialling import FIRST_DIRECT, LONGEST_DIRECT, LONGEST_PAUSE, MOST_PEERS, Dials

ABROAD = Whereabouts(frozenset(), False)


def peer_of(number: int) -> PeerId:
    return Identity.from_seed(number).peer_id


def learned(*numbers: int, addresses: int = 8) -> Dials:
    dials = Dials()
    for number in numbers:
        peer = peer_of(number)
        dials.learn(peer, [f"/ip4/8.8.8.{k}/tcp/4000/p2p/{peer}" for k in range(addresses)])
    return dials


def test_a_record_is_dialled_at_eight_addresses_of_its_own_peer() -> None:
    dials = learned(1, addresses=300)
    assert len(dials.take(peer_of(1), ABROAD, 0.0)) == 8
    me, other = peer_of(2), peer_of(3)
    dials.learn(me, ["nonsense", f"/ip4/8.8.8.8/tcp/4000/p2p/{other}", f"/ip4/10.0.0.1/tcp/4000/p2p/{me}"])
    assert dials.take(me, ABROAD, 0.0) == []


def test_one_peer_has_eight_addresses_dialled_in_a_minute_and_eight_at_once() -> None:
    dials = learned(1)
    taken = sum(len(dials.take(peer_of(1), ABROAD, second)) for second in range(60))
    assert 8 < taken <= 16


def test_all_peers_together_have_sixty_dialled_in_a_minute_and_sixty_at_once() -> None:
    dials = learned(*range(200))
    taken = sum(len(dials.take(peer_of(number), ABROAD, number * 60 / 200)) for number in range(200))
    assert 110 <= taken <= 120


def test_addresses_that_may_not_be_dialled_take_nothing_from_those_that_may() -> None:
    dials = learned(0)
    for number in range(1, 100):
        peer = peer_of(number)
        dials.learn(peer, [f"/ip4/127.0.0.1/tcp/4000/p2p/{peer}"])
        assert dials.take(peer, ABROAD, 0.0) == []
    assert len(dials.take(peer_of(0), ABROAD, 0.0)) == 8


def test_dialling_back_is_bounded_for_each_and_in_sum() -> None:
    dials = Dials()
    assert sum(dials.take_back(peer_of(0), 0.0) for _ in range(20)) == 5
    assert sum(dials.take_back(peer_of(number), 0.0) for number in range(100) for _ in range(5)) == 55


def test_who_cannot_be_reached_rests_ever_longer_until_it_is_there() -> None:
    dials, peer, now, pauses = Dials(), peer_of(1), 0.0, list[float]()
    for _ in range(9):
        assert not dials.rests(peer, now)
        dials.failed(peer, now)
        dials.failed(peer, now + 0.1)  # of the same moment
        began = now
        while dials.rests(peer, now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    dials.failed(peer, now)
    dials.succeeded(peer)
    assert not dials.rests(peer, now)


def test_what_is_remembered_is_bounded() -> None:
    dials = Dials()
    for number in range(MOST_PEERS + 10):
        dials.failed(PeerId(str(number)), 0.0)
    assert not dials.rests(PeerId("0"), 0.5)
    assert dials.rests(PeerId(str(MOST_PEERS + 9)), 0.5)


def test_who_is_reached_through_others_is_dialled_at_once_and_then_more_and_more_rarely() -> None:
    dials, peer, now, times = learned(1, addresses=1), peer_of(1), 0.0, list[float]()
    while now < 4_000:
        if dials.take_direct(peer, ABROAD, now):
            times.append(now)
        now += 5.0
    pauses = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert pauses[:5] == [FIRST_DIRECT * 2**number for number in range(5)]
    assert set(pauses[5:]) == {LONGEST_DIRECT}
    dials.succeeded(peer)
    assert dials.take_direct(peer, ABROAD, now)


def test_an_address_that_comes_later_is_dialled_when_it_comes() -> None:
    dials, peer = Dials(), peer_of(1)
    assert dials.take_direct(peer, ABROAD, 0.0) == []
    dials.learn(peer, [f"/ip4/8.8.8.8/tcp/4000/p2p/{peer}"])
    assert dials.take_direct(peer, ABROAD, 1.0)
