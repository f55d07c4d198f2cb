"""Moves that the plan of the run's owner asks for, decided by each peer for itself from the same records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from node.membership.capacity import Capacities, Peer
from node.membership.rebalance import Move, best_move, may_leave
from protocol.transport.base import PeerId

# What leaving the plan must gain. More than what lets the plan be followed, so that a swarm between the two stays as
# it is instead of going back and forth.
STRAY_GAIN = 1.3


def next_move(
    peers: Sequence[Peer],
    work: Sequence[float],
    planned: Mapping[PeerId, int],
    came_before: float = float("inf"),
    only: PeerId | None = None,
) -> Move | None:
    """The move to make next: by the plan where that fits the swarm as it is, else from a rich stage to the poorest.

    `planned` are the stages that the plan has for peers; those it does not name stay where they are. A plan whose end
    would call for a move back is not followed. See `best_move` for the other arguments.
    """
    if not planned or Capacities(peers, work).least == 0:
        return best_move(peers, work, came_before, only)
    if best_move(arranged(peers, work, planned), work) is None:
        move = planned_move(peers, work, planned, came_before, only)
        if move is not None or planned_move(peers, work, planned) is not None:
            return move  # or wait until those have rested
    return best_move(peers, work, came_before, only, gain=STRAY_GAIN)


def planned_move(
    peers: Sequence[Peer],
    work: Sequence[float],
    planned: Mapping[PeerId, int],
    came_before: float = float("inf"),
    only: PeerId | None = None,
) -> Move | None:
    """Of the moves that are left, the one that leaves the swarm the fastest meanwhile, then the first by peer id."""
    now = Capacities(peers, work)
    best, best_least = None, -1.0
    for peer, p in now.peers.items():
        target = planned.get(peer, p.stage)
        if not may_leave(now, p, target) or p.since >= came_before or (only is not None and peer != only):
            continue
        now.move(peer, target)
        least = now.least
        now.move(peer, p.stage)
        if least > best_least * (1 + 1e-9):  # rounding must not decide, or peers would disagree
            best, best_least = Move(peer, p.stage, target, is_planned=True), least
    return best


def arranged(peers: Sequence[Peer], work: Sequence[float], planned: Mapping[PeerId, int]) -> list[Peer]:
    """The swarm once everybody who may is where the plan has it."""
    goal = Capacities(peers, work)
    for p in _misplaced(peers, work, planned):
        goal.move(p.peer, planned[p.peer])
    stage_of = goal.stage_of
    return [
        replace(p, stage=stage_of[peer], capacity=goal.at(stage_of[peer], peer))
        for peer, p in goal.peers.items()
    ]


def _misplaced(peers: Sequence[Peer], work: Sequence[float], planned: Mapping[PeerId, int]) -> list[Peer]:
    return [
        p
        for p in peers
        if p.is_serving and p.stage < len(work) and planned.get(p.peer, p.stage) in p.may_serve - {p.stage}
    ]
