"""Limits on one peer: how many of its requests are answered at once and how often, and when it is ignored.

The first bounds the memory that a peer can make this node hold, the second its processor time; the third is for peers
that break the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, Self, TypeVar

from protocol.ground import PeerId
from protocol.windows import amount, window

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

MOST = 64  # requests of a peer and class answered at once
# even of the largest ones; two batches of eight, or the way to the next stage would not be hidden
FEWEST = 16
BUDGET = 64 << 20  # bytes of requests of a peer and class, and as many of answers, unless `FEWEST` need more
INFLOW_FEWEST = (
    256 << 20
)  # bytes of all peers' large requests on their way, unless four of the largest need more
LARGE = 64 << 10  # bytes of a request, from which it is counted
LONGEST_COMING = 10.0  # seconds that a request may take while others wait for its room
ROOM_PAUSE = 0.05
BAN_AFTER_STRIKES = 10
BAN_SECONDS = 300.0
# Streams that bring nothing, and kinds of requests that there are not, at once and a second, of each peer: what bad
# luck or a later version explains. Of all peers together there is no bound: one must not get another banned.
WITHOUT_END = (1e12, 1e12)
FRUITLESS = (32, 1.0), WITHOUT_END
MAX_OFFENDERS = 4_096  # remembered at once
MOST_DOUBLINGS = 64  # of a pause
MOST_REMEMBERED = 4_096  # peers whose allowances are kept


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

    @window
    def __repr__(self) -> str:
        return f"Places: {self.taken} taken | Requests: {len(self._waiting)} waiting"

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


class Closable(Protocol):
    """A stream that a request comes through."""

    def close(self) -> None:
        """Send what was written and end it."""


class Inflow:
    """Room for the large requests of all peers together that are on their way here: a half one holds memory.

    Mutable state: how much each stream has announced, and since when, the oldest first.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # bytes; one larger request may come alone
        self._coming: dict[Closable, tuple[int, float]] = {}

    @window
    def __repr__(self) -> str:
        coming = f"{len(self._coming)}, {amount(self.taken)} of {amount(self.most)}"
        return f"Coming: {coming}"

    @property
    def taken(self) -> int:
        return sum(nbytes for nbytes, _ in self._coming.values())

    async def enter(self, stream: Closable, nbytes: int) -> None:
        """Return when there is room for so much. What has come for `LONGEST_COMING` gives way: its stream ends."""
        clock = asyncio.get_running_loop().time
        while self._coming and self.taken + nbytes > self.most:
            oldest, (_, since) = next(iter(self._coming.items()))
            if clock() - since < LONGEST_COMING:
                await asyncio.sleep(ROOM_PAUSE)
                continue
            self.leave(oldest)
            oldest.close()
        self._coming[stream] = nbytes, clock()

    def leave(self, stream: Closable) -> None:
        """Give back a request's room: it is here, or its stream has ended."""
        self._coming.pop(stream, None)


class Bounded(dict[K, T]):
    """A table of `most` entries: the one set longest ago makes room, whichever way another one is set.

    `dropped` is called with each entry that made room, once it is out.
    """

    def __init__(self, most: int, dropped: Callable[[K, T], None] | None = None) -> None:
        super().__init__()
        self._most = most
        self._dropped = dropped

    @window
    def __repr__(self) -> str:
        return f"Entries: {len(self)} of {self._most:,}"

    def __setitem__(self, key: K, entry: T) -> None:
        self.pop(key, None)
        super().__setitem__(key, entry)
        if len(self) > self._most:
            oldest = next(iter(self))
            gone = self.pop(oldest)
            if self._dropped is not None:
                self._dropped(oldest, gone)

    def setdefault(self, key: K, default: T) -> T:
        """Return the entry, which stays where it is in the order, or set it."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, entries: Iterable[tuple[K, T]]) -> None:  # type: ignore[override]
        for key, entry in entries:
            self[key] = entry

    def __ior__(self, entries: object) -> Self:  # type: ignore[override, misc]
        raise TypeError("set the entries one by one: dict's own way would pass the bound by")


class PeerTable(Bounded[PeerId, T]):
    """A table of what is kept of each peer."""

    @window
    def __repr__(self) -> str:
        return f"Peers: {len(self)} of {self._most:,}"


def doubled(first: float, times: int, longest: float) -> float:
    """Return `first` doubled so many times, `longest` at most.

    The pause after what fails again and again. A float ends at 2^1024: a try a minute without an answer gets there
    in 17 hours.
    """
    return min(longest, first * 2.0 ** min(times, MOST_DOUBLINGS))


class Allowance:
    """An allowance, so much at once and so much a second, for each peer and for all of them together (token buckets).

    An amount that is known before is taken with `take`; one that is known afterwards, as the size of an answer, is
    paid with `spend`, and nothing more is done while `has_any` is False.
    Mutable state: what each peer and all of them have left, and when that was so.
    """

    def __init__(self, each: tuple[float, float], all_: tuple[float, float]) -> None:
        """`each` and `all_`: how much at once, how much a second."""
        self._each, self._all = each, all_
        self._left_to_each = PeerTable[tuple[float, float]](MOST_REMEMBERED)
        self._left_to_all: tuple[float, float] | None = None

    @classmethod
    def shared(cls, once: float, rate: float) -> Self:
        """Return an allowance of `once` and `rate` for all peers together, and half of each for one peer."""
        return cls((once / 2, rate / 2), (once, rate))

    @window
    def __repr__(self) -> str:
        (once, rate), (all_once, all_rate) = self._each, self._all
        most = f"{once:g} and {rate:g}/s | All: {all_once:g} and {all_rate:g}/s"
        return f"Each: {most} | Peers: {len(self._left_to_each)} remembered"

    def take(self, peer: PeerId, amount: float, now: float) -> bool:
        """Take so much if it is left, for this peer and for all; return whether it was."""
        enough = min(self._left(peer, now)) >= amount
        self.spend(peer, amount if enough else 0.0, now)
        return enough

    def has_any(self, peer: PeerId, now: float, overdrawn: float = 0.0) -> bool:
        """Return whether this peer, and all, have anything left, or owe no more than `overdrawn` times the most."""
        each, everybodys = self._left(peer, now)
        return each > -overdrawn * self._each[0] and everybodys > -overdrawn * self._all[0]

    def spend(self, peer: PeerId, amount: float, now: float) -> None:
        """Take so much, also what is not left."""
        each, everybodys = self._left(peer, now)
        self._left_to_each[peer] = each - amount, now
        self._left_to_all = everybodys - amount, now

    def _left(self, peer: PeerId, now: float) -> tuple[float, float]:
        each = _refilled(self._left_to_each.get(peer), self._each, now)
        return each, _refilled(self._left_to_all, self._all, now)


def _refilled(left: tuple[float, float] | None, limits: tuple[float, float], now: float) -> float:
    most, per_second = limits
    amount, since = left or (most, now)
    return min(most, amount + (now - since) * per_second)


class Bans:
    """Counts the strikes of peers and bans those with too many for a while.

    Mutable state: the strikes of each offender, and until when the worst are banned; `MAX_OFFENDERS` of each.
    """

    def __init__(self) -> None:
        self._strikes = PeerTable[int](MAX_OFFENDERS)
        self._banned_until = PeerTable[float](MAX_OFFENDERS)

    @window
    def __repr__(self) -> str:
        return f"Offenders: {len(self._strikes)} struck | Banned: {len(self._banned_until)} of late"

    def strike(self, peer: PeerId, now: float) -> bool:
        """Count a breach of protocol; after `BAN_AFTER_STRIKES` the peer is ignored for `BAN_SECONDS`.

        Whether that begins now.
        """
        strikes = self._strikes.pop(peer, 0) + 1
        if strikes < BAN_AFTER_STRIKES:
            self._strikes[peer] = strikes
            return False
        self._banned_until[peer] = now + BAN_SECONDS
        logger.warning("Peer %s broke the protocol too often and is ignored for a while", peer[-8:])
        return True

    def is_banned(self, peer: PeerId, now: float) -> bool:
        return now < self._banned_until.get(peer, float("-inf"))
