"""Which next-stage peer gets a microbatch: random, weighted by what was measured, never starving anyone."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from protocol.transport.base import PeerId

SMOOTHING = 0.2  # weight of the newest measurement
STRAGGLER = 2.0  # times the median answer: beyond it a sender's whole step waits, so it counts twice
FLOOR = 0.05  # of the mean weight: what the slowest peer still gets, since mixing is the point


@dataclass
class _Measured:
    seconds: float  # smoothed time from admission to answer
    queue: int


class Router:
    """Mutable state: a smoothed answer time and the last known queue of each peer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._measured: dict[PeerId, _Measured] = {}

    def note(self, peer: PeerId, seconds: float, queue: int) -> None:
        known = self._measured.get(peer)
        if known is None:
            self._measured[peer] = _Measured(seconds, queue)
        else:
            known.seconds += SMOOTHING * (seconds - known.seconds)
            known.queue = queue

    def forget(self, peer: PeerId) -> None:
        self._measured.pop(peer, None)

    def weights(self, peers: Sequence[PeerId]) -> list[float]:
        """Relative shares: inverse to answer time × (queue + 1), at least `FLOOR` of their mean.

        Beyond `STRAGGLER` medians the share falls with the square: with shares in proportion, a replica five
        times slower than its peers slowed all senders by 11 %, since it holds up each step that it has a part
        in. A peer that was never measured gets the mean of the others.
        """
        times = [
            max(measured.seconds, 1e-4) * (1 + measured.queue)
            for peer in peers
            if (measured := self._measured.get(peer)) is not None
        ]
        patience = STRAGGLER * median(times) if times else 0.0
        known = [min(1.0, patience / seconds) / seconds for seconds in times]
        mean = sum(known) / len(known) if known else 1.0
        values = iter(known)
        raw = [next(values) if peer in self._measured else mean for peer in peers]
        floor = FLOOR * sum(raw) / len(raw) if raw else 0.0
        return [max(weight, floor) for weight in raw]

    def choose(self, peers: Sequence[PeerId], exclude: Collection[PeerId] = ()) -> PeerId | None:
        """One of `peers` outside `exclude`, None when there is none."""
        candidates = [peer for peer in peers if peer not in exclude]
        if not candidates:
            return None
        return self._rng.choices(candidates, self.weights(candidates))[0]


class FixedRouter(Router):
    """The baseline: the n-th replica of a stage, by peer id, sends to the n-th of the next while both live."""

    def __init__(self, rng: random.Random, place: Callable[[], int]) -> None:
        super().__init__(rng)
        self._place = place

    def choose(self, peers: Sequence[PeerId], exclude: Collection[PeerId] = ()) -> PeerId | None:
        if not peers:
            return None
        own = peers[self._place() % len(peers)]
        return own if own not in exclude else super().choose(peers, exclude)
