"""Shares out the places in which visitors' requests are answered: by network, then by peer; an old one gives way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from protocol.ground import PeerId
from protocol.windows import window

GIVES_WAY_SECONDS = 20.0  # that a request may be answered while others wait for its place
LEAST_PAUSE = 0.1  # seconds between two looks for one that gives way


@dataclass(eq=False)
class Place:
    """A place that is taken. `give_way` ends the request in it and returns whether it could be ended.

    `heir` is the peer for which it was ended, until it is given back.
    """

    peer: PeerId
    since: float
    give_way: Callable[[], bool]
    heir: PeerId | None = None


class VisitorPlaces:
    """The places of all visitors together in one class of traffic.

    When all are taken, one of the network and of the peer that have most gives way to a newcomer that has fewer, and
    one that is older than `GIVES_WAY_SECONDS` to anybody. A place that is given back goes to the network, then the
    peer, that has fewest. Mutable state: the places taken, the oldest first, the visitors that wait for one, and how
    many places were promised to those.
    """

    def __init__(self, most: int, network_of: Callable[[PeerId], str] = lambda peer: "") -> None:
        """`network_of` is that of a peer's connection, empty where it is not known."""
        self._most = most
        self._network_of = network_of
        self._taken: dict[Place, None] = {}
        self._waiting: dict[asyncio.Future[None], PeerId] = {}
        self._promised = 0

    @window
    def __repr__(self) -> str:
        return f"Places: {len(self._taken)} of {self._most} taken | Requests: {len(self._waiting)} waiting"

    async def take(self, peer: PeerId, give_way: Callable[[], bool]) -> Callable[[], None]:
        """Wait for a place; returns what gives it back."""
        clock = asyncio.get_running_loop().time
        if len(self._taken) + self._promised >= self._most:
            await self._promise(peer)
            self._promised -= 1
        place = Place(peer, clock(), give_way)
        self._taken[place] = None

        def give_back() -> None:
            del self._taken[place]
            self._promise_to_next()

        return give_back

    async def _promise(self, peer: PeerId) -> None:
        """Wait until a place is promised to this request."""
        loop = asyncio.get_running_loop()
        promise: asyncio.Future[None] = loop.create_future()
        self._waiting[promise] = peer
        try:
            while not promise.done():
                self._make_room(peer, loop.time())
                await asyncio.wait([promise], timeout=self._next_old(loop.time()))
        except BaseException:
            if promise.done():
                self._promised -= 1
                self._promise_to_next()
            raise
        finally:
            self._waiting.pop(promise, None)

    def _promise_to_next(self) -> None:
        if not self._waiting or len(self._taken) + self._promised >= self._most:
            return
        of_network, of_peer = self._counts()

        def has(promise: asyncio.Future[None]) -> tuple[int, int]:
            peer = self._waiting[promise]
            return of_network[self._network_of(peer)], of_peer[peer]

        chosen = min(self._waiting, key=has)  # the first of equals
        del self._waiting[chosen]
        self._promised += 1
        chosen.set_result(None)

    def _counts(self) -> tuple[Counter[str], Counter[PeerId]]:
        """Places of each network and of each peer; one that was ended counts as its heir's already."""
        peers = Counter(place.heir or place.peer for place in self._taken)
        networks = Counter[str]()
        for peer, count in peers.items():
            networks[self._network_of(peer)] += count
        return networks, peers

    def _make_room(self, peer: PeerId, now: float) -> None:
        """End a request that gives way to one of this peer, if any does: its place is free a moment later."""
        of_network, of_peer = self._counts()
        network = self._network_of(peer)

        def has_more(place: Place) -> bool:
            theirs = self._network_of(place.peer)
            if theirs != network:
                return of_network[theirs] > of_network[network] + 1
            return of_peer[place.peer] > of_peer[peer] + 1

        def share(place: Place) -> tuple[int, int]:
            return -of_network[self._network_of(place.peer)], -of_peer[place.peer]

        for place in sorted(self._taken, key=share):  # the oldest of equals first
            is_old = now - place.since >= GIVES_WAY_SECONDS
            if place.heir is None and (has_more(place) or is_old) and place.give_way():
                place.heir = peer
                return

    def _next_old(self, now: float) -> float:
        """Seconds until the next place is old enough to give way to anybody."""
        old = (place.since + GIVES_WAY_SECONDS - now for place in self._taken)
        return max(LEAST_PAUSE, min((seconds for seconds in old if seconds > 0), default=GIVES_WAY_SECONDS))
