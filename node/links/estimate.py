"""The link to one peer, from round trips and from transfers. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from protocol.link_report import AT_LEAST

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
    """Mutable state: running estimates of one direction of one link. Times are seconds on the caller's clock.

    Real traffic is measured as it goes by: nothing here raises, whatever is noted and in whatever order.
    """

    visited_at: float = -math.inf  # when a probe was last tried
    measured_at: float = -math.inf
    transferred_at: float = -math.inf
    round_trips: int = 0
    transfers: int = 0
    failures: int = 0  # in a row
    mean_round_trip: float = 0.0
    deviation: float = 0.0  # mean absolute, of the round trip
    log_bandwidth: float = 0.0
    log_variance: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _at_least: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _transfers: dict[str, Transfer] = field(default_factory=dict)  # under way, by stream
    _opened: set[str] = field(default_factory=set)  # streams that something was sent on before

    # --- the round trip -----------------------------------------------------------------------

    def note_round_trip(self, seconds: float, now: float) -> None:
        """The first few count alike.

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
        self.measured_at, self.failures = now, 0

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
        """A frame of bulk data is handed to the network. The first on a stream waits for it to be opened."""
        transfer = self._transfers.setdefault(stream, Transfer(now, is_whole=stream in self._opened))
        transfer.under_way += 1
        self._opened.add(stream)

    def ended(self, stream: str, nbytes: int, now: float) -> None:
        """It was answered; with no bytes, it failed, and what overlaps with it tells nothing."""
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
        """`seconds` from the first byte to the answer; the round trip in it is none of the link's speed.

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
            share = UPWARD if error > 0 else DOWNWARD
            gain = max(share, 1 / (self.transfers + 1)) * (1 - noise)
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
