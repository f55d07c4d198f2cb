"""What each stage can do, from what its replicas say of themselves. Pure.

A swarm is as fast as its poorest stage: its throughput is the least, over the stages, of the sum of what their
replicas can do (docs/moving.md). Newcomers go where that sum is least, and peers move there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from node.membership.view import Member
from protocol.transport.base import PeerId


@dataclass(frozen=True)
class Peer:
    """A replica as its record shows it. One that joins counts for its stage and is not asked to move."""

    peer: PeerId
    stage: int
    capacity: float | None = None  # microbatches per second that it could do there; None is unknown
    since: float = 0.0  # wall clock at which it came to the stage
    is_serving: bool = True
    may_serve: frozenset[int] = frozenset()  # the stages that it would move to


def peer_of(member: Member) -> Peer:
    said = member.announcement
    return Peer(
        peer=member.peer,
        stage=said.stage,
        capacity=said.capacity,
        since=said.since,
        is_serving=said.state == "serving",
        may_serve=frozenset(said.may_serve),
    )


class Capacities:
    """Mutable state: microbatches per second of each stage, serving replicas of each, and where each peer is.

    `work` is what a microbatch costs at each stage, in any unit: at another stage a peer does in proportion. One
    whose speed is not known counts as the median of those that are. The order of the peers does not matter.
    """

    def __init__(self, peers: Iterable[Peer], work: Sequence[float]) -> None:
        self._work = work
        self.peers = {p.peer: p for p in sorted(peers, key=lambda p: p.peer) if p.stage < len(work)}
        self.stage_of = {peer: p.stage for peer, p in self.peers.items()}
        known = {p.peer: p.capacity * work[p.stage] for p in self.peers.values() if p.capacity}
        self._typical = median(known.values()) if known else 1.0
        self._speeds = {peer: known.get(peer, self._typical) for peer in self.peers}
        self.of = [0.0] * len(work)
        self.replicas = [0] * len(work)
        self.serving = [0] * len(work)
        for peer, p in self.peers.items():
            self.of[p.stage] += self.at(p.stage, peer)
            self.replicas[p.stage] += 1
            self.serving[p.stage] += p.is_serving

    @property
    def least(self) -> float:
        """Capacity of the poorest stage: microbatches per second of the swarm."""
        return min(self.of)

    def at(self, stage: int, peer: PeerId | None = None) -> float:
        """What the peer would add to a stage; without a name, a typical one."""
        speed = self._typical if peer is None else self._speeds[peer]
        return speed / self._work[stage]

    def add_newcomer(self, stage: int) -> None:
        """Somebody of whom nothing is known."""
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
