"""Compares what the stages can do and decides which peer moves where: each peer decides from the same records. Pure.

A swarm is as fast as its poorest stage: its throughput is the least, over the stages, of the sum of what their
replicas can do (docs/moving.md). Newcomers go where that sum is least. Peers move from where there is plenty to where
it is short, one at a time, and only when the least clearly rises. Moves that the plan of the run's owner asks for
come first, where it fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from node.membership.ledger import MOST_OF_NETWORK
from node.membership.view import Member, View
from protocol.ground import PeerId

# What the least capacity must rise by. Equal machines measure themselves several percent apart, and a move costs
# one peer minutes of downloading; below a sixth nobody would notice what was gained. Where no move gains this
# much, a swarm of equal peers is within 13 % of the best that it can reach.
GAIN = 1.15
# What leaving the plan must gain. More than what lets the plan be followed, so that a swarm between the two stays as
# it is instead of going back and forth.
STRAY_GAIN = 1.3
HURRY = 0.25  # of the usual patience: what a plan asks for is no matter of who has died
# times the median of the run's replicas, in the same work: more is not believed of a record, which anybody can write
MOST_CAPACITY = 4.0
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
    stands_for: float = 1.0  # replicas of its stage, where not all are known
    network: str = ""  # as its record says
    share: float = 1.0  # of a replica, that it counts as


def peers_of(view: View, stage: int, now: float) -> list[Peer]:
    """The replicas of a stage that are known at `now`; they stand for all that there are."""
    members = view.members(stage, now)
    each = view.replicas(stage, now) / len(members) if members else 1.0
    return [peer_of(member, each) for member in members]


def peer_of(member: Member, stands_for: float = 1.0) -> Peer:
    said = member.announcement
    return Peer(
        peer=member.peer,
        stage=said.stage,
        capacity=said.capacity,
        since=said.since,
        is_serving=said.state == "serving",
        may_serve=frozenset(said.may_serve),
        stands_for=stands_for,
        network=member.network,
    )


def surveyed(found: Iterable[Peer]) -> list[Peer]:
    """Weigh all that were found; those of one network share what twice the usual number of replicas would count."""
    peers = list(found)
    sizes = Counter(p.network for p in peers)
    most = MOST_OF_NETWORK * median(sizes.values()) if len(sizes) > 1 else len(peers)
    return [replace(p, share=most / size) if (size := sizes[p.network]) > most else p for p in peers]


class Capacities:
    """The capacity of each stage, all of its replicas together, recomputed as peers are added and moved.

    `work` is what a microbatch costs at each stage, in any unit: at another stage a peer does in proportion. A peer
    whose speed is not known counts as the median of those that are; one that claims more than `MOST_CAPACITY` times
    that counts as that much. The order of the peers does not matter.
    """

    def __init__(self, peers: Iterable[Peer], work: Sequence[float]) -> None:
        self._work = work
        self.peers = {p.peer: p for p in sorted(peers, key=lambda p: p.peer) if p.stage < len(work)}
        self.stage_of = {peer: p.stage for peer, p in self.peers.items()}
        known = {p.peer: p.capacity * work[p.stage] for p in self.peers.values() if p.capacity}
        self._typical = median(known.values()) if known else 1.0
        most = MOST_CAPACITY * self._typical
        self._speeds = {
            peer: p.share * min(most, known.get(peer, self._typical)) for peer, p in self.peers.items()
        }
        self.of = [0.0] * len(work)
        self.replicas = [0.0] * len(work)
        self.serving = [0.0] * len(work)
        for peer, p in self.peers.items():
            self.of[p.stage] += p.stands_for * self.at(p.stage, peer)
            self.replicas[p.stage] += p.stands_for
            self.serving[p.stage] += p.stands_for * p.is_serving

    @property
    def least(self) -> float:
        """Capacity of the poorest stage: microbatches per second of the swarm."""
        return min(self.of)

    def at(self, stage: int, peer: PeerId | None = None) -> float:
        """The capacity that the peer would add to a stage; without a name, that of a typical one."""
        speed = self._typical if peer is None else self._speeds[peer]
        return speed / self._work[stage]

    def add_newcomer(self, stage: int) -> None:
        """Count a peer of which nothing is known."""
        self.of[stage] += self.at(stage)
        self.replicas[stage] += 1

    def move(self, peer: PeerId, target: int) -> None:
        source = self.stage_of[peer]
        self.stage_of[peer] = target
        self.of[source] -= self.at(source, peer)
        self.of[target] += self.at(target, peer)
        for counts, share in ((self.replicas, 1), (self.serving, int(self.peers[peer].is_serving))):
            counts[source] -= share
            counts[target] += share


@dataclass(frozen=True)
class Move:
    peer: PeerId
    source: int
    target: int
    is_planned: bool = False  # by the run's owner


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
    """Pick the planned move that leaves the swarm the fastest meanwhile; among equals the first by peer id."""
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
    for p in peers:
        target = planned.get(p.peer, p.stage)
        if p.is_serving and p.stage < len(work) and target in p.may_serve - {p.stage}:
            goal.move(p.peer, target)
    stage_of = goal.stage_of
    return [
        replace(p, stage=stage_of[peer], capacity=goal.at(stage_of[peer], peer))
        for peer, p in goal.peers.items()
    ]


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
    """Pick a move to the poorest stage, from one that stays richer than that was.

    So each move makes the poorest of the two richer, and a chain of moves never comes back to where it was.
    The move taken is the one that leaves the swarm the fastest, then the one that leaves the poorer of the two the
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
    """Return whether the peer may move to `target`; a stage's last serving replica never may."""
    source = capacities.stage_of[peer.peer]
    able = peer.is_serving and target in peer.may_serve
    return able and source != target and capacities.serving[source] > 1


class MovePatience:
    """Waits until the same stage has been short for so long that it is not just a record that was late.

    A dead peer's record outlives it, records of the same moment are read at different ones, and a lookup may
    fail.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._target: int | None = None
        self._since = 0.0

    def is_over(self, move: Move | None, is_leased: bool, now: float) -> bool:
        """Return whether it is over, after another look. While somebody moves, all wait, and then again."""
        target = None if move is None or is_leased else move.target
        if target != self._target:
            self._target, self._since = target, now
        enough = self._seconds * (HURRY if move is not None and move.is_planned else 1)
        return target is not None and now - self._since >= enough
