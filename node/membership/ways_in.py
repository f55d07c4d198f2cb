"""Keeps ways in to a node that nobody can dial: peers that it stays connected to pass streams on to it.

Whether it can be dialled its peers say, which try (`Hello.port`), again and again: routers and networks change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from node.membership.joining import DIAL_BACK_DEADLINE, announce_outside
from node.membership.outside import (
    WITNESSES,
    Told,
    inner_port,
    is_dialled,
    listening_port,
    outside_addresses,
)
from node.watch.events import Events
from protocol.errors import NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages.peers import Hello, KeepWay, WayKept
from protocol.records.addresses import is_loopback, is_private, network_of
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.supervision import all_of
from protocol.windows import short, window

WAYS = 2  # that are kept: one peer may leave
LOOKED_EVERY = 3.0  # seconds, for those that were lost
UNSETTLED_EVERY = 15.0  # seconds between two tries while nobody passes streams on, or nobody is connected
LACKING_EVERY = 30.0  # the same while one peer does, and no second one
RENEWED_EVERY = 200.0  # seconds: a third of what `PassingOn` keeps them for
AT_ONCE = 3  # peers that are asked at a time, to dial this one or to pass streams on
ASKED = 16  # peers that are asked to pass streams on, at most at a time
MOST_JOINED_THROUGH = 4  # addresses that are named to others
DEADLINE = 5.0  # seconds for an answer


def serve_ways(rpc: Rpc) -> None:
    """Pass streams on to members that ask for it, as far as the transport is willing."""

    async def on_keep_way(request: Request[KeepWay]) -> Answer[WayKept]:
        seconds = rpc.transport.keep_way_to(request.peer)
        if not seconds:
            raise Refused("passes-nothing-on", "this peer passes no more streams on")
        return Answer(WayKept(seconds=seconds))

    rpc.handle(KeepWay.answered_by(on_keep_way))


class WaysIn:
    """Keeps `Transport.ways_in` true, and the addresses at which others join the run instead of at this node's.

    Mutable state: when they are looked for again, by the loop's clock, whether a lack of ways has been told, which
    hidden peers were connected directly at the last look, and the peers that have answered this one.
    """

    def __init__(self, rpc: Rpc, events: Events) -> None:
        self._rpc = rpc
        self._rng = random.Random(f"{rpc.transport.peer_id}/ways")
        self._events = events
        self._due = 0.0
        self._has_told = False
        self._met = frozenset[PeerId]()
        self._answered = list[PeerId]()
        self.has_looked = asyncio.Event()  # whether anybody can dial this node, so far as peers say

    @window
    def __repr__(self) -> str:
        return f"Ways in: {', '.join(map(short, self._rpc.transport.ways_in)) or 'none'}"

    async def run(self) -> None:
        """Look every `LOOKED_EVERY` seconds, for ever. May be started again."""
        clock, transport = asyncio.get_running_loop().time, self._rpc.transport
        while True:
            found = await transport.remotes()
            # a hidden peer that was met can neither pass streams of others on nor be joined through
            places = {peer: found[peer] for peer in found.keys() - transport.met_directly}
            has_lost = not set(transport.ways_in) <= places.keys()
            if has_lost or clock() >= self._due:
                await self._look(places, has_lost=has_lost)
            self._tell_met()
            self.has_looked.set()
            await asyncio.sleep(LOOKED_EVERY)

    async def _look(self, places: Mapping[PeerId, Sequence[str]], *, has_lost: bool) -> None:
        """Find out whether others can dial this node, and who passes streams on; after a loss only the second."""
        transport, connected = self._rpc.transport, sorted(places)
        is_hidden: bool | None = True if connected else None
        if not has_lost:
            is_hidden = await self._is_hidden(places)
            if is_hidden:  # on a busy machine one try comes to nothing, and a way in is slower than none
                is_hidden = await self._is_hidden(places)
        ways = await self._asked(connected) if is_hidden else []
        self._tell(ways, is_hidden=bool(is_hidden))
        transport.ways_in = tuple(ways)
        if is_hidden is not None:  # else nobody answered, and it is as it was
            transport.is_hidden = is_hidden
        through = dict.fromkeys([*ways, *self._answered] if is_hidden else [])
        named = [address for peer in through for address in _widest(peer, places.get(peer, ()))]
        transport.joined_through = tuple(sorted(named, key=is_private)[:MOST_JOINED_THROUGH])
        pause = RENEWED_EVERY if len(ways) == WAYS or is_hidden is False else UNSETTLED_EVERY
        self._due = asyncio.get_running_loop().time() + (LACKING_EVERY if 0 < len(ways) < WAYS else pause)

    async def _is_hidden(self, places: Mapping[PeerId, Sequence[str]]) -> bool | None:
        """Return whether other peers fail to dial this one; None where no peer answers.

        One network's word against others' counts for nothing: a liar would take this node's ways in from it.
        Where a peer has dialled it from outside, and it announces addresses of its own network alone, it announces
        that one from then on: a port has been forwarded since it started.
        """
        own = self._rpc.transport.addresses()
        port = listening_port(own)
        if not port:
            return False
        asked, told = self._rng.sample(sorted(places), min(ASKED, len(places))), list[Told]()
        self._answered = []
        for start in range(0, len(asked), AT_ONCE):  # some are no members, and say nothing
            some = asked[start : start + AT_ONCE]
            said = await all_of(*(self._dialled_by(peer, port) for peer in some))
            for peer, address in zip(some, said, strict=True):
                if address is not None:
                    self._answered.append(peer)
                    told.append(Told(address, network_of(places[peer])))
            if _is_enough(told):
                break
        reached = [one for one in told if one.address]
        if inner_port(own) and (outside := outside_addresses(reached, own)):
            await announce_outside(self._rpc.transport, outside, own, self._events)
        return not is_dialled(told) if told else None

    async def _dialled_by(self, peer: PeerId, port: int) -> str | None:
        """Return the address at which the peer has dialled this one, "" where it cannot; None without an answer."""
        try:
            welcome, _ = await self._rpc.call(peer, Hello(port=port), deadline=DEADLINE + DIAL_BACK_DEADLINE)
        except NolocoError:
            return None
        return welcome.reached

    async def _asked(self, connected: Sequence[PeerId]) -> list[PeerId]:
        """Ask peers to pass streams on, those that do first; returns up to `WAYS` that will."""
        before = [peer for peer in self._rpc.transport.ways_in if peer in connected]
        others = [peer for peer in connected if peer not in before]
        self._rng.shuffle(others)
        found, asked = list[PeerId](), [*before, *others][:ASKED]
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            will = await all_of(*map(self._passes_on, some))
            found += [peer for peer, does in zip(some, will, strict=True) if does]
            if len(found) >= WAYS:
                break
        return found[:WAYS]

    async def _passes_on(self, peer: PeerId) -> bool:
        try:
            await self._rpc.call(peer, KeepWay(), deadline=DEADLINE)
        except NolocoError:
            return False
        return True

    def _tell_met(self) -> None:
        """Report the hidden peers with which there is a direct connection by now, and those with none any more."""
        met = self._rpc.transport.met_directly
        if new := sorted(met - self._met):
            names = ", ".join(f"…{peer[-8:]}" for peer in new)
            self._events.say(
                f"Connected directly to {names}, behind another router: nobody passes streams on between the two.",
                "met-directly",
                peers=new,
            )
        if lost := sorted(self._met - met):
            self._events.emit("no-longer-direct", peers=lost)
        self._met = met

    def _tell(self, ways: Sequence[PeerId], *, is_hidden: bool) -> None:
        if set(ways) - set(self._rpc.transport.ways_in):
            names = ", ".join(f"…{peer[-8:]}" for peer in ways)
            self._events.say(
                f"Nobody can dial this node: {names} pass{'es' * (len(ways) == 1)} streams on to it.",
                "reached-through",
                through=list(ways),
            )
        elif is_hidden and not ways and not self._has_told:
            self._has_told = True
            self._events.warn(
                "Nobody can dial this node, and no peer that it knows passes streams on to it: it works with those "
                "alone that it can dial itself. A seed peer does, and a member that others can dial does with "
                "--relay-for-others 20Mbit.",
                "not-reached",
            )


def _is_enough(told: Sequence[Told]) -> bool:
    """Return whether more peers' words would not change whether this node counts as hidden."""
    witnesses = {one.network for one in told if one.address}
    return len(witnesses) >= WITNESSES or (len(told) >= AT_ONCE and is_dialled(told) is not None)


def _widest(peer: PeerId, places: Sequence[str]) -> list[str]:
    """Return the address at which to join through a peer that this one has dialled, if it is one for others."""
    usable = [place for place in places if place.count("/") == 4 and not is_loopback(place)]
    return [f"{place}/p2p/{peer}" for place in sorted(usable, key=is_private)[:1]]
