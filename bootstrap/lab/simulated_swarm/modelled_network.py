"""Links between simulated peers: latency by region, each peer's uplink as a queue, loss, relays and partitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from bootstrap.lab.simulated_swarm.event_queue import EventQueue
from bootstrap.lab.simulated_swarm.swarm_measures import SwarmMeasures
from bootstrap.lab.simulated_swarm.swarm_scenario import SwarmNetwork

MESSAGE = 300  # bytes of a small request or answer, with what frames and streams add
FRAME = 200  # bytes beside the tensors of a large one
RESENT_AFTER = 0.2  # seconds and a round trip more, of a message that TCP sends again


class Host(Protocol):
    """A peer as the network sees it."""

    region: int
    side: int  # of a network that is cut in two
    dials_out: bool  # behind a NAT
    uplink: float  # bytes per second
    uplink_free: float  # when the last large message has left
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
        self._latency = [[ms / 1_000 for ms in region.latency] for region in network.regions]
        self._measures = measures
        self._random = rng.random
        self.cut_since: float | None = None
        shares = [region.share / sum(r.share for r in network.regions) for region in network.regions]
        mean = sum(a * b * self._latency[i][j] for i, a in enumerate(shares) for j, b in enumerate(shares))
        self.round_trip = 2 * mean * (1 + self._jitter / 2)  # mean over pairs of peers

    def latency(self, one: Host, other: Host) -> float:
        """Latency of one message, one way, in seconds."""
        seconds = self._latency[one.region][other.region]
        if one.dials_out and other.dials_out:
            seconds *= 2.0  # over a relay
        seconds *= 1 + self._jitter * self._random()
        if self._loss and self._random() < self._loss:
            seconds = 3 * seconds + RESENT_AFTER
        return seconds

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
            queue.at(leaves + self.latency(one, other), self._arrive, other, action, arguments)
        return leaves

    def _arrive(self, other: Host, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if other.is_alive:
            action(*arguments)
