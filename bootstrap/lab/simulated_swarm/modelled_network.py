"""Links between simulated peers: latency by region, each peer's uplink as a queue, loss, relays and partitions.

Two peers behind NATs meet directly where punching succeeds. Between all others of them a third peer passes on what
they send, as `protocol.transport` does it: each has two such ways, and who passes on is bounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from bootstrap.lab.simulated_swarm.event_queue import EventQueue
from bootstrap.lab.simulated_swarm.swarm_measures import SwarmMeasures
from bootstrap.lab.simulated_swarm.swarm_scenario import SwarmNetwork

MESSAGE = 300  # bytes of a small request or answer, with what frames and streams add
FRAME = 200  # bytes beside the tensors of a large one
RESENT_AFTER = 0.2  # seconds and a round trip more, of a message that TCP sends again
WAYS = 2  # to a peer behind a NAT


class Host(Protocol):
    """A peer as the network sees it."""

    number: int
    region: int
    side: int  # of a network that is cut in two
    dials_out: bool  # behind a NAT
    ways: list[Host]  # those who pass on what others behind a NAT send to it
    uplink: float  # bytes per second
    uplink_free: float  # when the last large message has left
    passing_free: float  # when it has passed on the last one
    is_alive: bool


class ModelledNetwork:
    """Carries messages between simulated peers, with latency, bandwidth and loss.

    Mutable state: whether it is cut in two, and since when.
    """

    def __init__(
        self, queue: EventQueue, network: SwarmNetwork, measures: SwarmMeasures, rng: random.Random
    ) -> None:
        self._queue = queue
        self._loss = network.loss
        self._jitter = network.jitter
        self._punched = network.punched
        self._passed_on = network.passed_on * 1e6 / 8  # bytes per second
        self._relays: list[Host] = []
        self._latency = [[ms / 1_000 for ms in region.latency] for region in network.regions]
        self._measures = measures
        self._random = rng.random
        self.cut_since: float | None = None
        shares = [region.share / sum(r.share for r in network.regions) for region in network.regions]
        mean = sum(a * b * self._latency[i][j] for i, a in enumerate(shares) for j, b in enumerate(shares))
        self.round_trip = 2 * mean * (1 + self._jitter / 2)  # mean over pairs of peers

    def latency(self, one: Host, other: Host) -> float:
        """Latency of one message, one way, in seconds."""
        relay = self._relay_between(one, other)
        if relay is not None:
            return self._latency_of(one, relay) + self._latency_of(relay, other)
        return self._latency_of(one, other)

    def _latency_of(self, one: Host, other: Host) -> float:
        seconds = self._latency[one.region][other.region] * (1 + self._jitter * self._random())
        if self._loss and self._random() < self._loss:
            seconds = 3 * seconds + RESENT_AFTER
        return seconds

    # --- peers behind NATs --------------------------------------------------------------------

    def came(self, peer: Host) -> None:
        """Let a peer that can be dialled pass on for others."""
        if not peer.dials_out:
            self._relays.append(peer)

    def goes_through_others(self, one: Host, other: Host) -> bool:
        """Return whether a third peer passes on what the two send to each other."""
        if not (one.dials_out and other.dials_out):
            return False
        first, second = sorted((one.number, other.number))
        return crc32(b"%d %d" % (first, second)) >= self._punched * 2**32

    def _relay_between(self, one: Host, other: Host) -> Host | None:
        """Pick who passes on a message to `other`, one of its two ways; one whose peer is dead is replaced."""
        if not self.goes_through_others(one, other) or not self._relays:
            return None
        other.ways = [way for way in other.ways if way.is_alive]
        while len(other.ways) < min(WAYS, len(self._relays)):
            relay = self._relays[int(self._random() * len(self._relays))]
            if relay.is_alive:
                other.ways.append(relay)
            else:
                self._relays.remove(relay)
        return other.ways[int(self._random() * len(other.ways))] if other.ways else None

    def _passes_on(self, relay: Host, arrives: float, nbytes: int) -> float:
        """Return when the relay has passed on a large message, within its bound and its uplink."""
        self._measures.sent("passed on", nbytes)
        leaves = max(arrives, relay.passing_free) + nbytes / self._passed_on
        relay.passing_free = leaves
        relay.uplink_free = max(relay.uplink_free, self._queue.now) + nbytes / relay.uplink
        return leaves

    # --- messages -----------------------------------------------------------------------------

    def reaches(self, one: Host, other: Host) -> bool:
        return self.cut_since is None or one.side == other.side

    def send(
        self,
        one: Host,
        other: Host,
        purpose: str,
        nbytes: int,
        action: Callable[..., Any],
        *arguments: Any,
    ) -> float:
        """Send bytes: `action` happens where and when they arrive, unless the link is cut or `other` is dead by then.

        Returns when the last byte leaves. Small messages pass large ones by, as they have streams of their own.
        """
        queue, nbytes = self._queue, nbytes + FRAME
        self._measures.sent(purpose, nbytes)
        leaves = queue.now + nbytes / one.uplink
        if nbytes > 4 * MESSAGE:
            leaves = max(queue.now, one.uplink_free) + nbytes / one.uplink
            one.uplink_free = leaves
        if self.cut_since is None or one.side == other.side:
            queue.at(self._arrival(one, other, leaves, nbytes), self._arrive, other, action, arguments)
        return leaves

    def _arrival(self, one: Host, other: Host, leaves: float, nbytes: int) -> float:
        relay = self._relay_between(one, other)
        if relay is None:
            return leaves + self._latency_of(one, other)
        at_relay = leaves + self._latency_of(one, relay)
        if nbytes > 4 * MESSAGE:
            at_relay = self._passes_on(relay, at_relay, nbytes)
        return at_relay + self._latency_of(relay, other)

    def _arrive(self, other: Host, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if other.is_alive:
            action(*arguments)
