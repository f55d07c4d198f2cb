"""Moves between stages: never one too many, never back, never the last one of a stage, the same for every peer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.membership.capacity import GAIN, Move, MovePatience, Peer, best_move
from node.membership.placement import PROMPT_PEERS, pause_before_look
from protocol.ground import PeerId

counts = st.lists(st.integers(1, 8), min_size=2, max_size=5)
speeds = st.one_of(st.none(), st.floats(0.1, 10.0))


def peers_of(counts: list[int], speeds: dict[int, float | None] | None = None) -> list[Peer]:
    """As many replicas for each stage, able to serve any; `speeds` by number, else equal."""
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    anywhere = frozenset(range(len(counts)))
    return [
        Peer(PeerId(f"peer {n:02}"), stage, (speeds or {}).get(n, 1.0), may_serve=anywhere)
        for n, stage in enumerate(stages)
    ]


def counted(peers: list[Peer], stages: int) -> list[int]:
    return [sum(p.stage == stage for p in peers) for stage in range(stages)]


def moved(peers: list[Peer], move: Move, work: list[float]) -> list[Peer]:
    """After the move; the mover does there what its speed and the work of the stage allow."""

    def arrived(p: Peer) -> Peer:
        there = None if p.capacity is None else p.capacity * work[move.source] / work[move.target]
        return replace(p, stage=move.target, capacity=there)

    return [arrived(p) if p.peer == move.peer else p for p in peers]


def played(peers: list[Peer], work: list[float], most: int = 200) -> tuple[list[Peer], list[Move]]:
    """Moves one after another until nobody should move any more."""
    moves: list[Move] = []
    while (move := best_move(peers, work)) is not None:
        assert len(moves) < most, "this does not end"
        peers = moved(peers, move, work)
        moves.append(move)
    return peers, moves


def throughput(counts: list[int], work: list[float]) -> float:
    return min(count / cost for count, cost in zip(counts, work, strict=True))


def best_reachable(total: int, work: list[float]) -> float:
    """By trying all ways to spread so many equal peers."""
    spreads = product(range(total + 1), repeat=len(work) - 1)
    return max(throughput([*s, total - sum(s)], work) for s in spreads if sum(s) <= total)


def fewest_moves(start: list[int], work: list[float], goal: float) -> int:
    """To a throughput of `goal`: each stage needs so many peers, and each move brings one."""
    return sum(
        max(0, next(n for n in range(100) if n / cost >= goal - 1e-9) - count)
        for count, cost in zip(start, work, strict=True)
    )


@pytest.mark.long
@given(start=counts)
def test_equal_peers_come_near_the_best_with_no_move_too_many(start: list[int]) -> None:
    work = [1.0] * len(start)
    peers, moves = played(peers_of(start), work)
    end = counted(peers, len(start))
    assert throughput(end, work) >= best_reachable(sum(start), work) / GAIN
    assert len(moves) <= fewest_moves(start, work, throughput(end, work))


@given(start=st.lists(st.integers(1, 6), min_size=2, max_size=3), data=st.data())
def test_stages_of_unequal_work_come_near_the_best_too(start: list[int], data: Any) -> None:
    work = [data.draw(st.sampled_from([1.0, 1.25, 1.5, 2.0])) for _ in start]
    equal = [replace(p, capacity=1.0 / work[p.stage]) for p in peers_of(start)]
    peers, moves = played(equal, work)
    end = counted(peers, len(start))
    assert throughput(end, work) >= 0.8 * best_reachable(sum(start), work)
    assert len(moves) <= fewest_moves(start, work, throughput(end, work)) + 2


@given(start=counts, data=st.data())
def test_whatever_the_speeds_it_ends_and_no_stage_is_emptied(start: list[int], data: Any) -> None:
    known = {n: data.draw(speeds) for n in range(sum(start))}
    work = [data.draw(st.floats(0.2, 5.0)) for _ in start]
    peers, _ = played(peers_of(start, known), work)
    assert min(counted(peers, len(start))) >= 1


@given(start=counts, data=st.data())
def test_every_peer_computes_the_same_from_the_same_records(start: list[int], data: Any) -> None:
    known = {n: data.draw(speeds) for n in range(sum(start))}
    peers = peers_of(start, known)
    work = [1.0] * len(start)
    shuffled = data.draw(st.permutations(peers))
    move = best_move(peers, work)
    assert best_move(shuffled, work) == move
    if move is not None:
        assert best_move(shuffled, work, only=move.peer) == move


@given(start=st.lists(st.integers(0, 4), min_size=2, max_size=5))
def test_an_empty_stage_is_filled_first_if_anybody_can_be_spared(start: list[int]) -> None:
    work = [1.0] * len(start)
    move = best_move(peers_of(start), work, came_before=-1.0)  # even by those that have just come
    if min(start) > 0 or max(start) < 2:
        assert move is None
    else:
        assert move is not None
        assert (start[move.target], start[move.source]) == (0, max(start))


def test_a_small_gain_is_no_reason_to_move() -> None:
    assert best_move(peers_of([10, 8]), [1.0, 1.0]) is None  # 9/8
    assert best_move(peers_of([6, 4]), [1.0, 1.0]) is not None  # 5/4


def test_two_equally_poor_stages_are_filled_one_after_the_other() -> None:
    """No single move makes the swarm faster; the two of them do."""
    _, moves = played(peers_of([3, 3, 6, 6]), [1.0] * 4)
    assert [(move.source, move.target) for move in moves] == [(2, 0), (3, 1)]


def test_the_peer_that_fits_the_gap_goes_not_the_strongest() -> None:
    speeds: dict[int, float | None] = {0: 6.0, 1: 2.0, 2: 2.0, 3: 2.0}
    move = best_move(peers_of([4, 1], speeds), [1.0, 1.0])
    assert move == Move(PeerId("peer 00"), 0, 1)  # 6 and 7, instead of 10 and 3
    speeds = {0: 6.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 7.0}
    assert best_move(peers_of([4, 1], speeds), [1.0, 1.0]) == Move(PeerId("peer 01"), 0, 1)  # 10 and 9


def test_the_same_machine_does_less_where_there_is_more_to_do() -> None:
    """Stage 1 costs four times as much: its three equal peers are the poorest, though they are the most."""
    peers = [replace(p, capacity=1.0 if p.stage == 0 else 0.25) for p in peers_of([2, 3])]
    assert best_move(peers, [1.0, 4.0]) == Move(PeerId("peer 00"), 0, 1)


def test_who_is_new_joins_or_cannot_is_not_asked() -> None:
    peers, work = peers_of([4, 1]), [1.0, 1.0]
    new = [replace(p, since=100.0) for p in peers]
    assert best_move(new, work, came_before=100.0) is None
    assert best_move([replace(new[0], since=99.0), *new[1:]], work, came_before=100.0) is not None
    pinned = [replace(p, may_serve=frozenset()) if p.peer != "peer 02" else p for p in peers]
    assert best_move(pinned, work) == Move(PeerId("peer 02"), 0, 1)
    joining = [replace(p, is_serving=p.stage == 1) for p in peers]
    assert best_move(joining, work) is None


def test_who_is_on_the_way_counts_already() -> None:
    on_its_way = Peer(PeerId("peer 99"), 1, is_serving=False)
    assert best_move(peers_of([4, 2]), [1.0, 1.0]) is not None
    assert best_move([*peers_of([4, 2]), on_its_way], [1.0, 1.0]) is None


def test_the_last_serving_replica_stays_whoever_else_joins() -> None:
    peers = peers_of([3, 1], {0: 1.0, 1: 9.0, 2: 9.0})
    alone = [replace(p, is_serving=p.peer not in ("peer 01", "peer 02")) for p in peers]
    assert best_move(alone, [1.0, 1.0]) is None


def test_patience_waits_for_the_same_stage_and_anew_after_a_lease() -> None:
    patience = MovePatience(10.0)
    here, there = Move(PeerId("a"), 0, 1), Move(PeerId("b"), 1, 2)
    assert not patience.is_over(here, False, 0.0)
    assert not patience.is_over(replace(here, peer=PeerId("c")), False, 9.0)
    assert patience.is_over(here, False, 10.0)  # whoever it is that should go
    assert not patience.is_over(there, False, 11.0)
    assert not patience.is_over(None, False, 15.0)
    assert not patience.is_over(there, False, 16.0)
    assert not patience.is_over(there, True, 27.0)  # somebody moves
    assert not patience.is_over(there, False, 28.0)
    assert patience.is_over(there, False, 38.0)


def test_in_a_large_swarm_looks_are_rarer_and_a_node_reads_no_more_in_a_minute() -> None:
    assert pause_before_look(0, 60.0) == pause_before_look(PROMPT_PEERS, 60.0) == 60.0
    assert 1_000 / pause_before_look(1_000, 60.0) == 100 / pause_before_look(100, 60.0)
