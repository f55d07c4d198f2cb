"""Which peer should move from which stage to which, decided by each peer for itself from the same records. Pure.

A swarm is as fast as its poorest stage: its throughput is the least, over the stages, of the sum of what their
replicas can do (docs/moving.md). So peers go from where there is plenty to where it is short, one at a time, and
only when the least clearly rises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from protocol.transport.base import PeerId

# What the least capacity must rise by. Equal machines measure themselves several percent apart, and a move costs
# one peer minutes of downloading; below a sixth nobody would notice what was gained. Where no move gains this
# much, a swarm of equal peers is within 13 % of the best that it can reach.
GAIN = 1.15
SLACK = 1e-9  # of rounding: sums of the same numbers in another order


@dataclass(frozen=True)
class Peer:
    """A replica as its record shows it. One that joins counts for its stage and is not asked to move."""

    peer: PeerId
    stage: int
    capacity: float | None = None  # microbatches per second that it could do there; None is unknown
    since: float = 0.0  # wall clock at which it came to the stage
    is_serving: bool = True
    may_serve: frozenset[int] = frozenset()  # the stages that it would move to


@dataclass(frozen=True)
class Move:
    peer: PeerId
    source: int
    target: int


def best_move(
    peers: Sequence[Peer],
    work: Sequence[float],
    came_before: float = float("inf"),
    only: PeerId | None = None,
) -> Move | None:
    """The move to make next, None when all is well or nobody can help. The order of `peers` does not matter.

    `work` is what a microbatch costs at each stage, in any unit. Only peers that came to their stage before the
    time `came_before` move, which does not hold while a stage is empty. With `only`, the best move of that peer.

    Two stages may be equally poor, and then no single move makes the swarm faster. So moves are planned from the
    fullest to the poorest stage until the gain is there, and the first of them is returned.
    """
    plan = _Plan(peers, work)
    before = plan.least

    def may_begin(peer: Peer) -> bool:
        return (only is None or peer.peer == only) and (before == 0 or peer.since < came_before)

    first = plan.next_move(may_begin)
    move = first
    while move is not None:
        plan.make(move)
        if before == 0 or plan.least >= GAIN * before:
            return first
        move = plan.next_move(lambda peer: True)
    return None


class _Plan:
    """Mutable state: where each peer is in the plan, and the capacity of each stage."""

    def __init__(self, peers: Sequence[Peer], work: Sequence[float]) -> None:
        self._work = work
        self._peers = {p.peer: p for p in sorted(peers, key=lambda p: p.peer) if p.stage < len(work)}
        self._stage_of = {peer: p.stage for peer, p in self._peers.items()}
        known = {p.peer: p.capacity * work[p.stage] for p in self._peers.values() if p.capacity}
        typical = median(known.values()) if known else 1.0
        self._speeds = {peer: known.get(peer, typical) for peer in self._peers}
        self._capacities = [0.0] * len(work)
        self._serving = [0] * len(work)
        for peer, p in self._peers.items():
            self._capacities[p.stage] += self._speeds[peer] / work[p.stage]
            self._serving[p.stage] += p.is_serving

    @property
    def least(self) -> float:
        """Capacity of the poorest stage: microbatches per second of the swarm."""
        return min(self._capacities)

    def next_move(self, may: Callable[[Peer], bool]) -> Move | None:
        """To the poorest stage, from one that stays richer than that was.

        So each move makes the poorest of the two richer, and a chain of moves never comes back to where it was.
        Taken is the move that leaves the swarm the fastest, then the one that leaves the poorer of the two the
        richest, then the one from the richest stage, then the first by peer id.
        """
        target = self._capacities.index(self.least)
        best, best_key = None, (0.0, 0.0, 0.0)
        lowest: dict[int, float] = {}  # of the stages but the two, by source
        for peer, p in self._peers.items():
            source = self._stage_of[peer]
            if not self._may_leave(p, source, target) or not may(p):
                continue
            left = self._capacities[source] - self._speeds[peer] / self._work[source]
            if left <= self._capacities[target] * (1 + SLACK) or left <= SLACK:
                continue
            if source not in lowest:
                lowest[source] = min(
                    (c for s, c in enumerate(self._capacities) if s not in (source, target)),
                    default=float("inf"),
                )
            poorer = min(left, self._capacities[target] + self._speeds[peer] / self._work[target])
            key = (min(poorer, lowest[source]), poorer, self._capacities[source])
            if best is None or key > best_key:
                best, best_key = Move(peer, source, target), key
        return best

    def _may_leave(self, peer: Peer, source: int, target: int) -> bool:
        """Never a stage's last serving replica."""
        able = peer.is_serving and target in peer.may_serve
        return able and source != target and self._serving[source] > 1

    def make(self, move: Move) -> None:
        speed = self._speeds[move.peer]
        self._stage_of[move.peer] = move.target
        self._capacities[move.source] -= speed / self._work[move.source]
        self._capacities[move.target] += speed / self._work[move.target]
        self._serving[move.source] -= 1
        self._serving[move.target] += 1


class Patience:
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
        return target is not None and now - self._since >= self._seconds
