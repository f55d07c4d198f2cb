"""A measure of what a peer may send and receive, and what it has: one for all its streams.

Bytes are counted as an interface counts them. What streams carry is known before it goes; what p2pd adds (encryption,
headers, acknowledgements, the DHT, others' traffic through a relay) is estimated first and set right once the kernel
has been asked, see `protocol.transport.tcp_counts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.windows import amount, window

HEADERS = (
    1.05  # of Ethernet, IP, TCP, TLS and yamux: 66 bytes in 1,514, and one or two in a hundred of the rest
)
ACKNOWLEDGED = 0.025  # bytes the other way for each: 66 in two packets or so
BURST_SECONDS = 0.1  # unused, and allowed later
SLICE_SECONDS = 0.05  # of the limit go at once, so that streams take turns
SLICE_BYTES = range(4 << 10, 4 << 20)
AIM = 0.98  # of the limit: the rest is for what is not seen, as new connections and what is sent again


class Bucket:
    """A token bucket over bytes in one direction.

    Mutable state: when all that was taken so far has been paid for, by the clock. A `rate` of 0 is no limit.
    """

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        """`rate` in bytes per second."""
        self._rate = rate
        self._clock = clock
        self._paid_at = clock()

    def limit(self, rate: float) -> None:
        """Go by another rate from now on, also for what has not been paid for yet."""
        now = self._clock()
        owed = max(0.0, self._paid_at - now) * self._rate
        self._rate = rate
        self._paid_at = now + (owed / rate if rate else 0.0)

    def take(self, nbytes: float) -> float:
        """Take them; returns the seconds until they are paid for. Who takes later waits longer."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._paid_at = max(self._paid_at, now - BURST_SECONDS) + nbytes / self._rate
        return max(0.0, self._paid_at - now)


@dataclass
class _Way:
    """One direction. Mutable state: bytes estimated and counted since the start, and taken for what was missed."""

    bucket: Bucket
    estimated: float = 0.0
    counted: float = 0.0
    added: float = 0.0

    def take(self, nbytes: float) -> float:
        self.estimated += nbytes
        return self.bucket.take(nbytes)

    def count(self, nbytes: int) -> None:
        self.counted += nbytes
        excess = self.counted - self.estimated
        if excess > self.added:
            self.bucket.take(excess - self.added)
            self.added = excess


class Meter:
    """Measures and limits what all streams of a peer send and receive together.

    Mutable state: both directions, and whether the kernel's counts are known.
    """

    def __init__(
        self, upload: float = 0.0, download: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """See `limit`."""
        self._up = _Way(Bucket(0.0, clock))
        self._down = _Way(Bucket(0.0, clock))
        self._is_counted = False
        self.limit(upload, download)

    def limit(self, upload: float, download: float) -> None:
        """Set the limits, in bytes per second as an interface counts; 0 is none. Whoever waits has yet to wait."""
        self._up.bucket.limit(upload * AIM)
        self._down.bucket.limit(download * AIM)
        wanted = int(upload * SLICE_SECONDS) if upload else SLICE_BYTES.stop
        # of a stream, to be sent at once
        self.slice_bytes = min(max(wanted, SLICE_BYTES.start), SLICE_BYTES.stop)

    @window
    def __repr__(self) -> str:
        sent, received = map(amount, self.moved)
        return f"Sent: {sent} | Received: {received} | {'counted' if self._is_counted else 'estimated'}"

    def sending(self, nbytes: int) -> float:
        """Count bytes of a stream that are about to go; return the seconds to wait before they do."""
        self._down.take(nbytes * ACKNOWLEDGED)
        return self._up.take(nbytes * HEADERS)

    def received(self, nbytes: int) -> float:
        """Count bytes that have come; return the seconds to wait before more are taken."""
        self._up.take(nbytes * ACKNOWLEDGED)
        return self._down.take(nbytes * HEADERS)

    def counted(self, sent: int, received: int) -> None:
        """Note what the kernel counted since the last call: what the estimates left out is paid for later."""
        self._is_counted = True
        self._up.count(sent)
        self._down.count(received)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far: as counted, or as estimated where nobody counts."""
        if self._is_counted:
            return int(self._up.counted), int(self._down.counted)
        return int(self._up.estimated), int(self._down.estimated)


UNMETERED = Meter()
