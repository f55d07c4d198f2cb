"""Routing: random, more to the fast, something to everyone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.pipeline.routing import FLOOR, Router
from protocol.transport.base import PeerId

PEERS = [PeerId(f"peer {number}") for number in range(5)]
DRAWS = 20_000


def shares(
    router: Router, peers: list[PeerId] = PEERS, exclude: tuple[PeerId, ...] = ()
) -> dict[PeerId, float]:
    counts = Counter(router.choose(peers, exclude) for _ in range(DRAWS))
    return {peer: counts[peer] / DRAWS for peer in peers}


def router_with(seconds: list[float], queues: list[int] | None = None) -> Router:
    router = Router(random.Random(1))
    for peer, answer, queue in zip(PEERS, seconds, queues or [0] * len(seconds), strict=False):
        for _ in range(30):
            router.note(peer, answer, queue)
    return router


def test_peers_that_are_alike_get_the_same_share() -> None:
    for router in (Router(random.Random(1)), router_with([0.5] * 5)):
        counts = {peer: share * DRAWS for peer, share in shares(router).items()}
        expected = DRAWS / len(PEERS)
        chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi_square < 18.5  # 0.1 % of fair draws exceed this with four degrees of freedom


def test_a_peer_twice_as_fast_gets_twice_as_much() -> None:
    share = shares(router_with([1.0, 1.0, 1.0, 1.0, 0.5]))
    assert share[PEERS[4]] / share[PEERS[0]] == pytest.approx(2.0, rel=0.1)


def test_a_straggler_gets_less_than_its_speed_would_give() -> None:
    """Every step with a part on it waits for it."""
    share = shares(router_with([1.0, 1.0, 1.0, 1.0, 5.0]))
    assert 0.05 < share[PEERS[4]] / share[PEERS[0]] < 0.12


def test_a_long_queue_counts_as_slowness() -> None:
    share = shares(router_with([1.0] * 5, queues=[0, 0, 0, 0, 1]))
    assert share[PEERS[4]] / share[PEERS[0]] == pytest.approx(0.5, rel=0.1)


@given(seconds=st.lists(st.floats(0, 1e6), min_size=2, max_size=5), queue=st.integers(0, 10**6))
def test_nobody_starves(seconds: list[float], queue: int) -> None:
    peers = PEERS[: len(seconds)]
    weights = router_with(seconds, [queue, *[0] * 4]).weights(peers)
    least = min(weights) / sum(weights)
    assert least >= FLOOR / (1 + FLOOR) / len(peers)


def test_the_slowest_still_gets_its_floor() -> None:
    share = shares(router_with([0.01, 0.01, 0.01, 0.01, 60.0]))
    assert share[PEERS[4]] > 0.8 * FLOOR / len(PEERS)


def test_a_newcomer_is_tried_like_the_average() -> None:
    share = shares(router_with([1.0, 1.0, 1.0, 1.0]))
    assert share[PEERS[4]] == pytest.approx(0.2, rel=0.1)


def test_a_peer_that_recovers_gets_its_share_back() -> None:
    router = router_with([0.1, 0.1, 0.1, 0.1, 10.0])
    for _ in range(40):
        router.note(PEERS[4], 0.1, 0)
    assert shares(router)[PEERS[4]] == pytest.approx(0.2, rel=0.15)


def test_what_is_forgotten_counts_no_more() -> None:
    router = router_with([1.0, 1.0, 1.0, 1.0, 50.0])
    router.forget(PEERS[4])
    router.forget(PEERS[4])  # twice does no harm
    assert shares(router)[PEERS[4]] == pytest.approx(0.2, rel=0.1)


def test_excluded_peers_are_never_chosen_and_none_is_left_at_last() -> None:
    router = router_with([1.0] * 5)
    share = shares(router, exclude=(PEERS[0], PEERS[3]))
    assert share[PEERS[0]] == share[PEERS[3]] == 0
    assert router.choose(PEERS, exclude=PEERS) is None
    assert router.choose([]) is None


def test_the_same_seed_draws_the_same_peers() -> None:
    draws = [[Router(random.Random(seed)).choose(PEERS) for _ in range(3)] for seed in (1, 1)]
    assert draws[0] == draws[1]
