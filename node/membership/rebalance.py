"""Which peer should move from which stage to which, decided by each peer for itself from the same records. Pure.

A swarm is as fast as its poorest stage: its throughput is the least, over the stages, of the sum of what their
replicas can do (docs/moving.md). So peers go from where there is plenty to where it is short, one at a time, and
only when the least clearly rises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.membership.capacity import Capacities, Peer
from protocol.transport.base import PeerId

# What the least capacity must rise by. Equal machines measure themselves several percent apart, and a move costs
# one peer minutes of downloading; below a sixth nobody would notice what was gained. Where no move gains this
# much, a swarm of equal peers is within 13 % of the best that it can reach.
GAIN = 1.15
HURRY = 0.25  # of the usual patience: what a plan asks for is no matter of who has died
SLACK = 1e-9  # of rounding: sums of the same numbers in another order


@dataclass(frozen=True)
class Move:
    peer: PeerId
    source: int
    target: int
    is_planned: bool = False  # by the run's owner


def best_move(
    peers: Sequence[Peer],
    work: Sequence[float],
    came_before: float = float("inf"),
    only: PeerId | None = None,
    gain: float = GAIN,
) -> Move | None:
    """The move to make next, None when all is well or nobody can help. The order of `peers` does not matter.

    `work` is what a microbatch costs at each stage, in any unit. Only peers that came to their stage before the
    time `came_before` move, which does not hold while a stage is empty. With `only`, the best move of that peer.
    `gain` is what the swarm's throughput must rise by.

    Two stages may be equally poor, and then no single move makes the swarm faster. So moves are planned from the
    fullest to the poorest stage until the gain is there, and the first of them is returned.
    """
    planned = Capacities(peers, work)
    before = planned.least

    def may_begin(peer: Peer) -> bool:
        return (only is None or peer.peer == only) and (before == 0 or peer.since < came_before)

    first = _next_move(planned, may_begin)
    move = first
    while move is not None:
        planned.move(move.peer, move.target)
        if before == 0 or planned.least >= gain * before:
            return first
        move = _next_move(planned, lambda peer: True)
    return None


def _next_move(now: Capacities, may: Callable[[Peer], bool]) -> Move | None:
    """To the poorest stage, from one that stays richer than that was.

    So each move makes the poorest of the two richer, and a chain of moves never comes back to where it was.
    Taken is the move that leaves the swarm the fastest, then the one that leaves the poorer of the two the
    richest, then the one from the richest stage, then the first by peer id.
    """
    target = now.of.index(now.least)
    best, best_key = None, (0.0, 0.0, 0.0)
    lowest: dict[int, float] = {}  # of the stages but the two, by source
    for peer, p in now.peers.items():
        source = now.stage_of[peer]
        if not may_leave(now, p, target) or not may(p):
            continue
        left = now.of[source] - now.at(source, peer)
        if left <= now.of[target] * (1 + SLACK) or left <= SLACK:
            continue
        if source not in lowest:
            lowest[source] = min(
                (c for s, c in enumerate(now.of) if s not in (source, target)), default=float("inf")
            )
        poorer = min(left, now.of[target] + now.at(target, peer))
        key = (min(poorer, lowest[source]), poorer, now.of[source])
        if best is None or key > best_key:
            best, best_key = Move(peer, source, target), key
    return best


def may_leave(capacities: Capacities, peer: Peer, target: int) -> bool:
    """Never a stage's last serving replica."""
    source = capacities.stage_of[peer.peer]
    able = peer.is_serving and target in peer.may_serve
    return able and source != target and capacities.serving[source] > 1


class MovePatience:
    """Whether the same stage has been short for so long that it is not just a record that was late.

    A dead peer's record outlives it, records of the same moment are read at different ones, and a lookup may
    fail. Mutable state: which stage was to be helped, and since when.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._target: int | None = None
        self._since = 0.0

    def is_over(self, move: Move | None, is_leased: bool, now: float) -> bool:
        """After another look at the records. While somebody moves, all wait, and then anew."""
        target = None if move is None or is_leased else move.target
        if target != self._target:
            self._target, self._since = target, now
        enough = self._seconds * (HURRY if move is not None and move.is_planned else 1)
        return target is not None and now - self._since >= enough
