"""Estimates of this node's links to others, from round trips and transfers; whom to measure next, and how long to
wait for an answer. Pure.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId
from protocol.messages.peers import MAX_PROBE_BYTES
from protocol.records.announcement import AT_LEAST, MOST_PUBLISHED, MOST_TOLD, PEER_CHARACTERS, LinkReport
from protocol.windows import amount, counted, window

RECENT = 16  # samples that a minimum or a maximum is taken over: what changed for good is noticed after these
SMOOTHING = 1 / 8  # of the mean round trip, and
DEVIATION_SMOOTHING = 1 / 4  # of its deviation, as in RFC 6298
CLOCK_SECONDS = 2e-4  # what an event loop on an idle machine is late by; nothing shorter can be measured
LARGEST_NOISE = 0.5  # of a sample, relative: beyond it a transfer tells only how fast the link is at least
# other traffic makes a transfer slower, never faster: trust the fast ones more
UPWARD, DOWNWARD = 1 / 4, 1 / 12
FIRST_DOUBT = 0.25  # standard deviation of the logarithm that a single transfer is believed within
LEAST_TRANSFER = 32 * 1024  # bytes: less is mostly waiting, for the other machine and for the stream to open
LONG_TRANSFER = 8 << 20  # bytes after which one that goes on and on is counted
# what is beyond these was not measured but made by a clock that jumped or a machine that slept
LONGEST_ROUND_TRIP = 3600.0
LONGEST_TRANSFER = 1e6
MOST_BYTES = 1 << 50
MOST_PEERS = 48  # "a few dozen": enough that each of a thousand peers is measured by 48 others
FRESH_SECONDS = 300.0  # a bandwidth that real traffic told this lately needs no probe
ENOUGH_TRANSFERS = 3
FIRST_PROBE_BYTES = 32 * 1024  # to an unknown link: a quarter of a second at 1 Mbit/s
PROBE_SECONDS = 0.2  # that a probe of a known link may take it
LEAST_PAUSE = 10.0  # between two probes of a node, whomever they go to
DUTY = 0.01  # of a link's time, at most, is spent on probes of it
LONGEST = 60.0, 1e12  # round trip and bandwidth that can be told
ANSWERS = 32  # how many past ones a deadline is learned from
ENOUGH_ANSWERS = 5  # before they count for more than the manifest's starting point


@dataclass
class Transfer:
    """Frames that overlap in one stream, counted together: from the first one's start to the last one's answer.

    One by one they would be measured wrongly, since each waits for those before it, and since answers come in
    bunches when the other side was busy.
    """

    began: float
    under_way: int = 0
    nbytes: int = 0
    is_whole: bool = True


@dataclass
class LinkEstimate:
    """Estimates round trip and bandwidth of one direction of a link.

    Mutable state: running estimates of one direction of one link. Times are seconds on the caller's clock.

    Real traffic is measured as it goes by: nothing here raises, whatever is noted and in whatever order.
    """

    visited_at: float = -math.inf  # when a probe was last tried
    measured_at: float = -math.inf
    transferred_at: float = -math.inf
    round_trips: int = 0
    transfers: int = 0
    mean_round_trip: float = 0.0
    deviation: float = 0.0  # mean absolute, of the round trip
    log_bandwidth: float = 0.0
    log_variance: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _at_least: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _transfers: dict[str, Transfer] = field(default_factory=dict)  # under way, by stream
    _opened: set[str] = field(default_factory=set)  # streams that something was sent on before

    @window
    def __repr__(self) -> str:
        trip, rate = self.round_trip, self.bandwidth
        trips = "unknown" if trip is None else f"{trip * 1e3:.1f} ms of {self.round_trips}"
        rates = "unknown" if rate is None else f"{amount(rate)}/s of {counted(self.transfers, 'transfer')}"
        return f"Round trip: {trips} | Bandwidth: {rates} | Under way: {len(self._transfers)}"

    # --- the round trip -----------------------------------------------------------------------

    def note_round_trip(self, seconds: float, now: float) -> None:
        """Note a round trip; the first few count alike.

        The RFC begins with a deviation of half the round trip, for a cautious timer; here that would hide the
        bandwidth of long links while there are few samples.
        """
        seconds = _within(seconds, LONGEST_ROUND_TRIP)
        if not self.round_trips:
            self.mean_round_trip = seconds
        else:
            error = seconds - self.mean_round_trip
            self.mean_round_trip += max(SMOOTHING, 1 / (self.round_trips + 1)) * error
            self.deviation += max(DEVIATION_SMOOTHING, 1 / self.round_trips) * (abs(error) - self.deviation)
        self._recent.append(seconds)
        self.round_trips += 1
        self.measured_at = now

    @property
    def round_trip(self) -> float | None:
        """Seconds: the least of the last ones, which the link took rather than the busy machines at its ends."""
        return min(self._recent, default=None)

    @property
    def typical_round_trip(self) -> float:
        """Seconds: the median of the last ones, jitter included, but not the few that waited behind bulk data.

        0 while none was measured.
        """
        return median(self._recent) if self._recent else 0.0

    # --- bandwidth ----------------------------------------------------------------------------

    def began(self, stream: str, now: float) -> None:
        """Note that a frame of bulk data is handed over. The first on a stream waits for the stream to be opened."""
        transfer = self._transfers.setdefault(stream, Transfer(now, is_whole=stream in self._opened))
        transfer.under_way += 1
        self._opened.add(stream)

    def ended(self, stream: str, nbytes: int, now: float) -> None:
        """Note that a frame was answered; with no bytes, it failed, and what overlaps with it tells nothing."""
        transfer = self._transfers.get(stream)
        if transfer is None:
            return
        transfer.under_way -= 1
        transfer.nbytes += nbytes
        transfer.is_whole &= nbytes > 0
        if transfer.under_way and transfer.nbytes < LONG_TRANSFER:
            return
        del self._transfers[stream]
        if transfer.is_whole and self.round_trips and transfer.nbytes >= LEAST_TRANSFER:
            self.note_transfer(transfer.nbytes, now - transfer.began, now)
        if transfer.under_way:  # what still goes on was sent right behind what is counted
            self._transfers[stream] = Transfer(now - self.typical_round_trip, transfer.under_way)

    def note_transfer(self, nbytes: int, seconds: float, now: float) -> None:
        """`seconds` from the first byte to the answer; the round trip in it says nothing of the link's speed.

        Nothing that was transferred tells nothing.
        """
        if nbytes <= 0:
            return
        nbytes, seconds = min(nbytes, MOST_BYTES), _within(seconds, LONGEST_TRANSFER)
        self.transferred_at = now
        resolution = max(self.deviation, CLOCK_SECONDS)
        busy = max(seconds - self.typical_round_trip, resolution)
        noise = resolution / busy
        if noise > LARGEST_NOISE:
            self._at_least.append(nbytes / (busy + 2 * resolution))
            return
        sample = math.log(nbytes / busy)
        if not self.transfers:
            self.log_bandwidth, self.log_variance = sample, max(noise, FIRST_DOUBT) ** 2
        else:
            error = sample - self.log_bandwidth
            # a second transfer that is faster counts alone: the first one was held up
            gain = max(UPWARD, 1 / self.transfers) if error > 0 else max(DOWNWARD, 1 / (self.transfers + 1))
            gain *= 1 - noise
            self.log_bandwidth += gain * error
            self.log_variance = (1 - gain) * (self.log_variance + gain * error**2)
        self.transfers += 1

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, None while nothing is known; a lower bound when the uncertainty is `AT_LEAST`."""
        measured = math.exp(self.log_bandwidth) if self.transfers else None
        return max(filter(None, (measured, max(self._at_least, default=None))), default=None)

    @property
    def uncertainty(self) -> float:
        """Standard deviation of the bandwidth's logarithm; `AT_LEAST` when there is only a lower bound."""
        if not self.transfers or self.bandwidth != math.exp(self.log_bandwidth):
            return AT_LEAST
        return min(math.sqrt(self.log_variance), AT_LEAST * 0.99)


def _within(seconds: float, most: float) -> float:
    return min(max(seconds, 0.0), most)


class Links:
    """The link estimates to the peers that were used most recently.

    Mutable state: an estimate for each of the last `MOST_PEERS` peers, least recently used first.
    """

    def __init__(self, most: int = MOST_PEERS) -> None:
        self._most = most
        self._dropped: deque[PeerId] = deque(maxlen=most)
        self._links = PeerTable[LinkEstimate](most, lambda peer, _: self._dropped.append(peer))

    @window
    def __repr__(self) -> str:
        return f"Peers: {len(self._links)} of {self._most} | Dropped: {len(self._dropped)}"

    def of(self, peer: PeerId) -> LinkEstimate | None:
        return self._links.get(peer)

    # --- measurements -------------------------------------------------------------------------

    def visit(self, peer: PeerId, now: float) -> LinkEstimate:
        """Note that a probe of this peer begins, whatever becomes of it."""
        link = self._use(peer)
        link.visited_at = now
        return link

    @contextmanager
    def transfer(self, peer: PeerId, stream: str, nbytes: int, clock: Callable[[], float]) -> Iterator[None]:
        """Measure around a request with bulk data that is answered as soon as all of it has arrived.

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
        link = self._links[peer] = self._links.get(peer) or LinkEstimate()
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
        """Reports of the links that were measured, the one measured last first."""
        known = [(peer, link) for peer, link in self._links.items() if link.round_trips]
        known.sort(key=lambda item: (-item[1].measured_at, item[0]))
        return [_report(peer, link) for peer, link in known[:MOST_TOLD]]

    def published(self) -> list[LinkReport]:
        """Reports of the links measured last: readers of a record over time get to see the others as well."""
        return self.told()[:MOST_PUBLISHED]


def pause_after(seconds: float) -> float:
    """The seconds without a probe after one that kept a link busy for `seconds`."""
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


class AdaptiveDeadline:
    """Median plus a generous multiple of the spread of past durations, by itself never above the manifest's limit.

    Mutable state: the last `ANSWERS` durations in seconds. A deadline that was missed enters as twice itself,
    so that deadlines grow again when the network slows down.
    """

    def __init__(self, limit: float, least: float) -> None:
        self._limit = limit
        self._least = least
        self._durations: deque[float] = deque(maxlen=ANSWERS)

    @window
    def __repr__(self) -> str:
        return f"Deadline: {self.seconds():.2f} of {self._limit:g} s | Answers: {len(self._durations)}"

    def note(self, seconds: float) -> None:
        self._durations.append(seconds)

    def note_missed(self) -> None:
        self._durations.append(min(self._limit, 2 * self.seconds()))

    def seconds(self, more: float = 0.0) -> float:
        """The deadline, and so many seconds `more`, which are known to pass first."""
        if len(self._durations) < ENOUGH_ANSWERS:
            return self._limit + more
        middle = median(self._durations)
        spread = median(abs(duration - middle) for duration in self._durations)
        return min(self._limit, max(self._least, 3 * middle + 10 * spread)) + more
