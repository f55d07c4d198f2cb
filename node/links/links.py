"""What this node knows of its links to others, and whom to measure next. Pure."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from node.links.estimate import LinkEstimate
from protocol.link_report import MOST_PUBLISHED, MOST_TOLD, PEER_CHARACTERS, LinkReport
from protocol.messages import MAX_PROBE_BYTES
from protocol.transport.base import PeerId

MOST_PEERS = 48  # "a few dozen": enough that each of a thousand peers is measured by 48 others
FRESH_SECONDS = 300.0  # a bandwidth that real traffic told this lately needs no probe
ENOUGH_TRANSFERS = 3
FIRST_PROBE_BYTES = 32 * 1024  # to an unknown link: a quarter of a second at 1 Mbit/s
PROBE_SECONDS = 0.2  # that a probe of a known link may take it
LEAST_PAUSE = 10.0  # between two probes of a node, whomever they go to
DUTY = 0.01  # of a link's time, at most, is spent on probes of it
LONGEST = 60.0, 1e12  # round trip and bandwidth that can be told


class Links:
    """Mutable state: an estimate for each of the last `MOST_PEERS` peers, least recently used first."""

    def __init__(self, most: int = MOST_PEERS) -> None:
        self._most = most
        self._links: OrderedDict[PeerId, LinkEstimate] = OrderedDict()
        self._dropped: deque[PeerId] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._links)

    def of(self, peer: PeerId) -> LinkEstimate | None:
        return self._links.get(peer)

    # --- measurements -------------------------------------------------------------------------

    def visit(self, peer: PeerId, now: float) -> LinkEstimate:
        """A probe of this peer begins, whatever becomes of it."""
        link = self._use(peer)
        link.visited_at = now
        return link

    @contextmanager
    def transfer(self, peer: PeerId, stream: str, nbytes: int, clock: Callable[[], float]) -> Iterator[None]:
        """Around a request with bulk data that is answered as soon as all of it has arrived.

        `stream` names what is sent in order: transfers that share it wait for one another. A failure is no
        measurement.
        """
        link = self._use(peer)
        link.began(stream, clock())
        arrived = 0
        try:
            yield
            arrived = nbytes
        finally:
            link.ended(stream, arrived, clock())

    def _use(self, peer: PeerId) -> LinkEstimate:
        link = self._links.setdefault(peer, LinkEstimate())
        self._links.move_to_end(peer)
        while len(self._links) > self._most:
            self._dropped.append(self._links.popitem(last=False)[0])
        return link

    def take_dropped(self) -> list[PeerId]:
        """Peers that had to make room since the last call."""
        dropped = [peer for peer in self._dropped if peer not in self._links]
        self._dropped.clear()
        return dropped

    # --- whom to measure ----------------------------------------------------------------------

    def choose(self, candidates: Sequence[PeerId], rng: random.Random) -> PeerId | None:
        """A random unknown peer while there is room, else now and then; otherwise the one visited longest ago."""
        unknown = [peer for peer in candidates if peer not in self._links]
        known = [peer for peer in candidates if peer in self._links]
        if unknown and (not known or len(self._links) < self._most or rng.random() < 0.5):
            return rng.choice(unknown)
        return min(known, key=lambda peer: self._links[peer].visited_at, default=None)

    def bulk_bytes(self, peer: PeerId, now: float) -> int:
        """The size of a probe of the bandwidth; 0 when real traffic has told it lately."""
        link = self._links.get(peer)
        if link is None or link.bandwidth is None:
            return FIRST_PROBE_BYTES
        if link.transfers >= ENOUGH_TRANSFERS and now - link.transferred_at < FRESH_SECONDS:
            return 0
        size = int(min(MAX_PROBE_BYTES, max(FIRST_PROBE_BYTES, link.bandwidth * PROBE_SECONDS)))
        return size // 1024 * 1024

    # --- what others see ----------------------------------------------------------------------

    def told(self) -> list[LinkReport]:
        """All that were measured, the one measured last first."""
        known = [(peer, link) for peer, link in self._links.items() if link.round_trips]
        known.sort(key=lambda item: (-item[1].measured_at, item[0]))
        return [_report(peer, link) for peer, link in known[:MOST_TOLD]]

    def published(self) -> list[LinkReport]:
        """Those measured last: readers of a record over time get to see the others as well."""
        return self.told()[:MOST_PUBLISHED]


def pause_after(seconds: float) -> float:
    """How long to send no probe after one that kept a link busy for `seconds`."""
    return max(LEAST_PAUSE, seconds / DUTY)


def median_round_trip(reports: Sequence[LinkReport]) -> float | None:
    """Seconds; None without any."""
    return median(report.round_trip for report in reports) if reports else None


def _report(peer: PeerId, link: LinkEstimate) -> LinkReport:
    longest, fastest = LONGEST
    bandwidth = link.bandwidth
    return LinkReport(
        peer=peer[-PEER_CHARACTERS:],
        round_trip=round(min(longest, link.round_trip or 0.0), 6),
        bandwidth=None if bandwidth is None else round(min(fastest, max(1.0, bandwidth)), 1),
        uncertainty=round(link.uncertainty, 3) if bandwidth is not None else 0.0,
    )
