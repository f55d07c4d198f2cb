"""The counts that are kept while a swarm is simulated. Nothing is decided by them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

BIN = 10.0  # seconds of a point of the time-lapse
WINDOW = 100  # microbatches that a replica is offered on average in a window of the routing balance
KEPT_EVENTS = 100_000


@dataclass
class Moment:
    """One point of the time-lapse: sums over its seconds, and what was seen at its end."""

    done: int = 0  # microbatches whose gradients came back to stage 0
    done_by_first: int = 0  # of them, by peers that were there from the beginning, at every stage
    ideal: float = 0.0
    rounds: int = 0
    alone: int = 0
    peers: int = 0
    serving: int = 0
    spread: float | None = None  # by the theory's, mean over the stages
    done_by_side: list[int] = field(default_factory=lambda: [0, 0])
    ideal_by_side: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass
class RoutingWindow:
    """Offers of microbatches to the replicas of one stage since the window began."""

    offered: Counter[str] = field(default_factory=Counter)
    total: int = 0


class SwarmMeasures:
    """Counts what happens in a simulated swarm.

    Mutable state: counts since the warm-up, the time-lapse, and the digest of the event log.
    """

    def __init__(self, warm_up: float, keeps_events: bool = False) -> None:
        self.warm_up = warm_up  # seconds
        self.counts = False  # the warm-up is over
        self.moments: defaultdict[int, Moment] = defaultdict(Moment)
        self.bytes = Counter[str]()  # by purpose
        self.peer_minutes = 0.0
        self.pairing_trips: list[float] = []  # from the first proposal of a round to the agreement
        self.rounds = self.alone = 0
        self.proposals: defaultdict[int, Counter[str]] = defaultdict(Counter)  # of a stage, by who was asked
        self.partners_again = self.expected_again = 0.0
        self.imbalance: list[float] = []  # most over mean, a window of a stage each
        self.offers = self.refusals = self.resends = 0
        self.idle: defaultdict[str, float] = defaultdict(float)  # seconds by cause
        self.computing = 0.0
        self.useful_after: list[float] = []  # seconds from a newcomer's arrival to its first gradient
        self.overdue_known = self.known = (
            0  # members of looked-at views, those of them that should be forgotten
        )
        self.moves = 0
        self.deaths = 0
        self.events: list[tuple[float, str, str, str]] = []
        self._keeps_events = keeps_events
        self._digest = hashlib.blake2b(digest_size=16)
        self._joined: dict[str, str] = {}  # of each peer, one that it is connected with through pairs
        self._windows: defaultdict[int, RoutingWindow] = defaultdict(RoutingWindow)

    # --- the event log ------------------------------------------------------------------------

    def log(self, time: float, event: str, peer: str, detail: str = "") -> None:
        self._digest.update(f"{time!r} {event} {peer} {detail}\n".encode())
        if self._keeps_events and len(self.events) < KEPT_EVENTS:
            self.events.append((time, event, peer, detail))

    @property
    def digest(self) -> str:
        """Digest of all events: the same for the same scenario and seed."""
        return self._digest.hexdigest()

    # --- what happens -------------------------------------------------------------------------

    def at(self, time: float) -> Moment:
        return self.moments[int(time // BIN)]

    def sent(self, purpose: str, nbytes: int) -> None:
        if self.counts:
            self.bytes[purpose] += nbytes

    def microbatch_done(self, time: float, side: int) -> None:
        """Count a microbatch whose gradient is back at stage 0, by the side of a cut network."""
        moment = self.at(time)
        moment.done += 1
        moment.done_by_side[side] += 1

    def looked_up(self, nbytes: int) -> None:
        if self.counts:
            self.bytes["discovery"] += nbytes

    def offered(self, stage: int, peer: str, replicas: float) -> None:
        """Count that a sender chose this replica for a microbatch."""
        if not self.counts:
            return
        self.offers += 1
        window = self._windows[stage]
        window.offered[peer] += 1
        window.total += 1
        if window.total >= WINDOW * replicas:
            mean = window.total / max(len(window.offered), replicas)
            self.imbalance.append(max(window.offered.values()) / mean)
            self._windows[stage] = RoutingWindow()

    def resent(self, time: float, sender: str, failed: str) -> None:
        """Count that a microbatch is sent to another peer, as one has failed."""
        self.resends += self.counts
        self.log(time, "resend", sender, failed)

    def round_ended(self, time: float, is_alone: bool, is_uneven: bool) -> None:
        """Count a round; in a stage of an uneven number one replica is alone by necessity."""
        moment = self.at(time)
        moment.rounds += 1
        moment.alone += is_alone
        if self.counts:
            self.rounds += 1
            self.alone += is_alone and not is_uneven

    def proposed(self, stage: int, partner: str) -> None:
        if self.counts:
            self.proposals[stage][partner] += 1

    def partner_met(self, peer: str, partner: str, is_again: bool, chance: float) -> None:
        """Count whether it is the partner of the last round once more, and how likely that was."""
        if self.counts:
            self.partners_again += is_again
            self.expected_again += chance
            self._joined[self._group_of(peer)] = self._group_of(partner)

    def _group_of(self, peer: str) -> str:
        """One that stands for all who are connected with the peer through pairs."""
        while (other := self._joined.setdefault(peer, peer)) != peer:
            self._joined[peer] = self._joined.setdefault(other, other)
            peer = other
        return peer

    def connected(self, peers: Iterable[str]) -> float | None:
        """The share of the peers that are in the largest group of those connected through pairs; None of nobody."""
        groups = Counter(map(self._group_of, peers))
        return max(groups.values()) / groups.total() if groups else None
