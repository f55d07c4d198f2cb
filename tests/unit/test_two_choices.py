"""Of two peers the one with less to do: even queues, and a question only where it takes little beside the work."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from node.links.trip_times import FIRST_DEADLINE
from node.pipeline.routing import Router
from node.pipeline.two_choices import WORTH_ASKING, TwoChoices
from protocol.ground import PeerId

PEERS = [PeerId(f"peer {number}") for number in range(20)]
ONE, OTHER, THIRD = PEERS[:3]


def choices(seed: int = 1) -> TwoChoices:
    return TwoChoices(Router(random.Random(seed)))


def test_two_different_ones_are_drawn_while_there_are_two() -> None:
    drawn = [choices(seed).candidates([ONE, OTHER, THIRD], exclude=[THIRD]) for seed in range(20)]
    assert {frozenset(pair) for pair in drawn} == {frozenset([ONE, OTHER])}
    assert {pair[0] for pair in drawn} == {ONE, OTHER}
    assert choices().candidates([ONE, OTHER], exclude=[OTHER]) == [ONE]
    assert choices().candidates([ONE], exclude=[ONE]) == []


def test_every_pair_is_drawn_as_often() -> None:
    one = choices()
    pairs = Counter(frozenset(one.candidates(PEERS[:4])) for _ in range(6_000))
    assert len(pairs) == 6
    assert max(pairs.values()) < 1.15 * min(pairs.values())


def test_the_one_with_less_to_do_is_chosen() -> None:
    assert choices().chosen([ONE, OTHER], {ONE: 2.0, OTHER: 0.5}, 0.0) == OTHER
    assert choices().chosen([ONE, OTHER], {ONE: 0.5, OTHER: 0.5}, 0.0) == ONE


def test_one_that_is_reached_through_others_counts_as_having_one_microbatch_more() -> None:
    router = Router(random.Random(1), goes_through_others=[ONE].__contains__)
    one = TwoChoices(router)
    for peer in (ONE, OTHER):
        router.note(peer, 0.5)
    assert one.chosen([ONE, OTHER], {ONE: 0.0, OTHER: 0.5}, 0.0) == OTHER
    assert one.chosen([ONE, OTHER], {ONE: 0.0, OTHER: 0.6}, 0.0) == ONE
    for _ in range(2):
        assert one.chosen([ONE, OTHER], {}, 0.0) == OTHER
        one.sent(OTHER, 0.0)
    assert one.chosen([ONE, OTHER], {}, 0.0) == ONE


def test_one_that_says_nothing_comes_last() -> None:
    assert choices().chosen([ONE, OTHER], {OTHER: 1e6}, 0.0) == OTHER


def test_without_any_answer_own_microbatches_decide() -> None:
    one = choices()
    one.sent(ONE, 1.0)
    assert one.chosen([ONE, OTHER], {}, 1.0) == OTHER
    one.returned(ONE, 1.0)
    assert one.chosen([ONE, OTHER], {}, 1.0) == ONE


def test_one_that_is_late_gets_no_other_although_it_has_nothing_to_do() -> None:
    router = Router(random.Random(1))
    one = TwoChoices(router)
    for peer in (ONE, OTHER, THIRD):
        router.note(peer, 0.5)
    told = {ONE: 0.0, OTHER: 9.0}
    one.sent(ONE, 10.0)
    assert one.chosen([ONE, OTHER], told, 11.0) == ONE
    assert one.chosen([ONE, OTHER], told, 12.0) == OTHER
    router.note(ONE, 0.5, said=1.0)  # slower by its own account, which buys it no time
    assert one.chosen([ONE, OTHER], told, 12.0) == OTHER
    one.returned(ONE, 10.0)
    assert one.chosen([ONE, OTHER], told, 99.0) == ONE


def balanced(asks: bool, seed: int) -> int:
    """The longest queue after ten microbatches for each peer, none of which is done yet."""
    one, queues = choices(seed), Counter[PeerId]()
    for _ in range(10 * len(PEERS)):
        pair = one.candidates(PEERS)
        told = {peer: float(queues[peer]) for peer in pair}
        queues[one.chosen(pair, told, 0.0) if asks else pair[0]] += 1
    return max(queues.values())


def test_queues_are_even() -> None:
    """Ten each would be perfect; one random choice leaves some peer with half as many again and more."""
    assert max(balanced(True, seed) for seed in range(10)) <= 13
    assert min(balanced(False, seed) for seed in range(10)) >= 14


@pytest.mark.parametrize(("round_trip", "answer", "asks"), [(0.05, 1.0, True), (0.2, 1.0, False)])
def test_it_is_asked_where_that_takes_little_beside_the_work(
    round_trip: float, answer: float, asks: bool
) -> None:
    router = Router(random.Random(1))
    one = TwoChoices(router)
    assert one.asks
    for _ in range(3):
        one.times.answered(ONE, round_trip)
    router.note(ONE, answer)
    assert (round_trip <= WORTH_ASKING * answer) is asks
    assert one.asks is asks
    assert one.times.deadline_of(OTHER) == FIRST_DEADLINE
