"""How many requests of one peer and class are answered at once: the bound on the memory that it makes us hold."""

from __future__ import annotations

import asyncio
from collections import deque

MOST = 64  # requests of a peer and class answered at once
FEWEST = (
    16  # even of the largest ones; two batches of eight, or the way to the next stage would not be hidden
)
BUDGET = 64 << 20  # bytes of requests of a peer and class, and as many of answers, unless `FEWEST` need more


def places_for(max_payload: int) -> int:
    """Requests answered at once when each, and each answer, has at most `max_payload` bytes."""
    return max(FEWEST, min(MOST, BUDGET // max(1, max_payload)))


class RequestLimiter:
    """The places of one peer and class, shared by all of its streams and kept until its last request is answered.

    Mutable state: how many are taken, who waits for one, how many streams there are.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.streams = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_unused(self) -> bool:
        return not self.taken and not self.streams

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
