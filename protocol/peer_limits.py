"""What one peer may do here: how many of its requests are answered at once, and when it is ignored.

The first bounds the memory that a peer can make this node hold; the second is for peers that break the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TypeVar

from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST = 64  # requests of a peer and class answered at once
# even of the largest ones; two batches of eight, or the way to the next stage would not be hidden
FEWEST = 16
BUDGET = 64 << 20  # bytes of requests of a peer and class, and as many of answers, unless `FEWEST` need more
BAN_AFTER_STRIKES = 10
BAN_SECONDS = 300.0
MAX_OFFENDERS = 4_096  # remembered at once


def places_for(max_payload: int) -> int:
    """Requests answered at once when each, and each answer, has at most `max_payload` bytes."""
    return max(FEWEST, min(MOST, BUDGET // max(1, max_payload)))


class RequestLimiter:
    """The places of one peer and class, shared by all of its streams and kept until its last request is answered.

    Mutable state: how many are taken, and who waits for one.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, places: int) -> None:
        """Wait until fewer than `places` are taken, in the order of asking."""
        if self.taken < places and not self._waiting:
            self.taken += 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine  # the place comes with it
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.give_back()
            else:
                self._waiting.remove(mine)
            raise

    def give_back(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return
        self.taken -= 1


class PeerTable(dict[PeerId, T]):
    """What is kept of each peer, of `most` at a time: the one whose entry was set longest ago is forgotten first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, peer: PeerId, entry: T) -> None:
        self.pop(peer, None)
        super().__setitem__(peer, entry)
        if len(self) > self._most:
            del self[next(iter(self))]


class Bans:
    """Mutable state: the strikes of each offender, and until when the worst are banned; `MAX_OFFENDERS` of each."""

    def __init__(self) -> None:
        self._strikes = PeerTable[int](MAX_OFFENDERS)
        self._banned_until = PeerTable[float](MAX_OFFENDERS)

    def strike(self, peer: PeerId, now: float) -> None:
        """Count a breach of protocol; after `BAN_AFTER_STRIKES` the peer is ignored for `BAN_SECONDS`."""
        strikes = self._strikes.pop(peer, 0) + 1
        if strikes < BAN_AFTER_STRIKES:
            self._strikes[peer] = strikes
            return
        self._banned_until[peer] = now + BAN_SECONDS
        logger.warning("Peer %s broke the protocol too often and is ignored for a while", peer[-8:])

    def is_banned(self, peer: PeerId, now: float) -> bool:
        return now < self._banned_until.get(peer, float("-inf"))
