"""Moves by a plan: all of them when it fits, none when it does not, and no way back and forth."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from node.membership.capacity import Move, Peer, next_move
from protocol.ground import PeerId


def peers_of(counts: list[int]) -> list[Peer]:
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    anywhere = frozenset(range(len(counts)))
    return [Peer(PeerId(f"peer {n:02}"), stage, 1.0, may_serve=anywhere) for n, stage in enumerate(stages)]


def counted(peers: list[Peer], stages: int) -> list[int]:
    return [sum(p.stage == stage for p in peers) for stage in range(stages)]


def played(peers: list[Peer], planned: dict[PeerId, int], stages: int) -> tuple[list[Peer], list[Move]]:
    """Until nobody should move; no stage is ever empty."""
    moves: list[Move] = []
    while (move := next_move(peers, [1.0] * stages, planned)) is not None:
        peers = [replace(p, stage=move.target) if p.peer == move.peer else p for p in peers]
        moves.append(move)
        assert min(counted(peers, stages)) > 0
        assert len(moves) < 100, "this does not end"
    return peers, moves


@given(count=st.integers(2, 5), stages=st.integers(2, 4), data=st.data())
def test_a_balanced_plan_is_followed_with_no_move_too_many(
    count: int, stages: int, data: st.DataObject
) -> None:
    peers = peers_of([count] * stages)
    order = data.draw(st.permutations([p.peer for p in peers]))
    planned = {peer: place % stages for place, peer in enumerate(order)}
    needed = sum(planned[p.peer] != p.stage for p in peers)
    end, moves = played(peers, planned, stages)
    assert {p.peer: p.stage for p in end} == planned
    assert len(moves) == needed
    assert all(move.is_planned for move in moves)


@given(start=st.lists(st.integers(1, 6), min_size=2, max_size=4), data=st.data())
def test_any_plan_comes_to_rest_and_leaves_no_stage_empty(start: list[int], data: st.DataObject) -> None:
    stages, peers = len(start), peers_of(start)
    planned = {p.peer: data.draw(st.integers(0, stages - 1)) for p in peers if data.draw(st.booleans())}
    end, _ = played(peers, planned, stages)
    without, _ = played(peers, {}, stages)
    # the price of a plan that does not fit: it takes a gain of 1.3 to leave it
    assert min(counted(end, stages)) * 1.3 >= min(counted(without, stages))


def test_a_plan_for_a_swarm_that_half_died_gives_way() -> None:
    peers = peers_of([4, 1])
    planned = {p.peer: p.stage for p in peers}  # as it was before three of stage 1 died
    move = next_move(peers, [1.0, 1.0], planned)
    assert move is not None
    assert (move.target, move.is_planned) == (1, False)


def test_two_single_replicas_never_change_places() -> None:
    peers = peers_of([1, 1])
    assert next_move(peers, [1.0, 1.0], {peers[0].peer: 1, peers[1].peer: 0}) is None


def test_who_may_not_serve_the_planned_stage_stays() -> None:
    peers = [replace(p, may_serve=frozenset({p.stage})) for p in peers_of([2, 2])]
    assert next_move(peers, [1.0, 1.0], {p.peer: 1 - p.stage for p in peers}) is None


def test_moves_by_the_plan_wait_until_the_last_mover_has_rested() -> None:
    peers = [replace(p, since=100.0) for p in peers_of([2, 2])]
    planned = {p.peer: 1 - p.stage for p in peers}
    assert next_move(peers, [1.0, 1.0], planned, came_before=50.0) is None
    assert next_move(peers, [1.0, 1.0], planned, came_before=150.0) is not None
