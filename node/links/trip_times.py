"""The time that answers to small questions take, and so how long to wait for the next one. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

from node.links.links import AdaptiveDeadline
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId

FIRST_DEADLINE = 2.0  # of a peer not called before: a stream, perhaps a connection, has to be opened first
LEAST_DEADLINE = 0.05  # a busy event loop answers later than the network
LATE = 3.0  # times what a peer took the last time: it may take that at least
REMEMBERED_PEERS = 1_024
REMEMBERED_TRIPS = 9


class TripTimes:
    """The times that answers take, and so the deadline of the next one. Pure.

    Mutable state: the deadline, the last round trips, and that of each peer which a stream was opened to, in seconds.

    One deadline for all would do where all are equally far: of partners on one continent and on another the far ones
    would be lost whenever the last few to answer were near.
    """

    def __init__(self) -> None:
        self._deadline = AdaptiveDeadline(FIRST_DEADLINE, LEAST_DEADLINE)
        self._trips: deque[float] = deque(maxlen=REMEMBERED_TRIPS)
        self._met = PeerTable[float](REMEMBERED_PEERS)

    @property
    def round_trip(self) -> float:
        """Seconds that an answer takes, as far as is known."""
        return median(self._trips) if self._trips else 0.0

    def deadline_of(self, peer: PeerId) -> float:
        """Seconds that its next answer may take."""
        known = self._met.get(peer)
        if known is None:
            return FIRST_DEADLINE
        return min(FIRST_DEADLINE, max(self._deadline.seconds(), LATE * known))

    def missed(self, peer: PeerId) -> None:
        """Note that the peer gave no answer within its deadline."""
        if peer in self._met:
            self._deadline.note_missed()
            self._met.pop(peer, None)

    def answered(self, peer: PeerId, seconds: float) -> None:
        if peer in self._met:
            self._deadline.note(seconds)
            self._trips.append(seconds)
        self._met[peer] = seconds
