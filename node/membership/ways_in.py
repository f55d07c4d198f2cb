"""Keeps ways in to a node that nobody can dial: peers that it stays connected to pass streams on to it.

Whether it can be dialled its peers say, which try (`Hello.port`), again and again: routers and networks change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from node.membership.joining import DIAL_BACK_DEADLINE
from node.membership.outside import listening_port
from node.watch.events import Events
from protocol.errors import NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages.peers import Hello, KeepWay, WayKept
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.supervision import all_of
from protocol.windows import short, window

WAYS = 2  # that are kept: one peer may leave
LOOKED_EVERY = 15.0  # seconds, for those that were lost
RENEWED_EVERY = 200.0  # seconds: a third of what `PassingOn` keeps them for
TRIED = 3  # peers that are asked to dial this one
ASKED = 16  # peers that are asked to pass streams on, at most at a time
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
    """Keeps `Transport.ways_in` true.

    Mutable state: when they are looked for again, by the loop's clock, and whether a lack of ways has been told.
    """

    def __init__(self, rpc: Rpc, events: Events) -> None:
        self._rpc = rpc
        self._rng = random.Random(f"{rpc.transport.peer_id}/ways")
        self._events = events
        self._due = 0.0
        self._has_told = False

    @window
    def __repr__(self) -> str:
        return f"Ways in: {', '.join(map(short, self._rpc.transport.ways_in)) or 'none'}"

    async def run(self) -> None:
        """Look every `LOOKED_EVERY` seconds, for ever. May be started again."""
        clock = asyncio.get_running_loop().time
        while True:
            transport = self._rpc.transport
            connected = [peer for peer, _ in await transport.peers()]
            are_there = bool(transport.ways_in) and set(transport.ways_in) <= set(connected)
            if clock() >= self._due or (transport.ways_in and not are_there):
                is_hidden = await self._is_hidden(connected)
                if is_hidden:  # on a busy machine one try comes to nothing, and a way in is slower than none
                    is_hidden = await self._is_hidden(connected)
                ways = await self._asked(connected) if is_hidden else []
                self._tell(ways, is_hidden=bool(is_hidden))
                transport.ways_in = tuple(ways)
                is_settled = ways or is_hidden is False
                self._due = clock() + (RENEWED_EVERY if is_settled else LOOKED_EVERY)
            await asyncio.sleep(LOOKED_EVERY)

    async def _is_hidden(self, connected: Sequence[PeerId]) -> bool | None:
        """Return whether every peer that answers has failed to dial this one; None where no peer answers."""
        port = listening_port(self._rpc.transport.addresses())
        if not port:
            return False
        asked, answers = self._rng.sample(connected, min(ASKED, len(connected))), list[bool]()
        for start in range(0, len(asked), TRIED):  # some are no members, and say nothing
            some = await all_of(*(self._dialled_by(peer, port) for peer in asked[start : start + TRIED]))
            answers += [answer for answer in some if answer is not None]
            if any(answers) or len(answers) >= TRIED:
                break
        return not any(answers) if answers else None

    async def _dialled_by(self, peer: PeerId, port: int) -> bool | None:
        """Return whether the peer can dial this one; None where it does not say."""
        try:
            welcome, _ = await self._rpc.call(peer, Hello(port=port), deadline=DEADLINE + DIAL_BACK_DEADLINE)
        except NolocoError:
            return None
        return bool(welcome.reached)

    async def _asked(self, connected: Sequence[PeerId]) -> list[PeerId]:
        """Ask peers to pass streams on, those that do first; returns up to `WAYS` that will."""
        before = [peer for peer in self._rpc.transport.ways_in if peer in connected]
        others = [peer for peer in connected if peer not in before]
        self._rng.shuffle(others)
        found = list[PeerId]()
        for peer in [*before, *others][:ASKED]:
            try:
                await self._rpc.call(peer, KeepWay(), deadline=DEADLINE)
            except NolocoError:
                continue
            found.append(peer)
            if len(found) == WAYS:
                break
        return found

    def _tell(self, ways: Sequence[PeerId], *, is_hidden: bool) -> None:
        if ways and not self._rpc.transport.ways_in:
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
