"""Who averages with whom in an all-reduce: one replica of the stage, the first by peer id, calls the roll."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from protocol.errors import Refused
from protocol.transport.base import PeerId


@dataclass(frozen=True)
class Assembled:
    """The replicas of one all-reduce, by peer id, and the name of it."""

    name: str
    members: tuple[PeerId, ...]


class Assembly:
    """Mutable state: who waits for the next all-reduce, who is not waited for, how many there have been.

    All members of an all-reduce are told the same, so that none of them averages one part with these and another
    part with those. Who is slower than the others by more than `seconds` is waited for once, and then not any more
    until it has taken part again: its call waits for the others' next one.
    """

    def __init__(self, life: str, seconds: float, group: Callable[[], Collection[PeerId]]) -> None:
        """`group` is whom to expect; `life` begins the names, which must differ from those of any other roll."""
        self._life = life
        self._seconds = seconds
        self._group = group
        self._waiting: dict[PeerId, None] = {}
        self._opened: asyncio.Future[Assembled] | None = None
        self._absent: set[PeerId] = set()
        self._count = 0

    async def join(self, peer: PeerId) -> Assembled:
        """Wait until all are here, `seconds` after the first one at most. Raises `Refused` ("alone")."""
        if self._opened is None:
            loop = asyncio.get_running_loop()
            opened = self._opened = loop.create_future()
            timer = loop.call_later(self._seconds, self._time_is_up, opened)
            opened.add_done_callback(lambda _: timer.cancel())
        opened = self._opened
        self._waiting[peer] = None
        self._absent &= set(self._group())
        if len(self._waiting) > 1 and set(self._group()) - self._absent <= self._waiting.keys():
            self._open()
        return await asyncio.shield(opened)

    def _time_is_up(self, opened: asyncio.Future[Assembled]) -> None:
        if self._opened is opened:  # else this roll was complete in the same moment
            self._open()

    def _open(self) -> None:
        opened, members = self._opened, tuple(sorted(self._waiting))
        assert opened is not None
        self._opened = None
        self._waiting.clear()
        if len(members) < 2:
            opened.set_exception(Refused("alone"))
            opened.exception()  # seen: whoever called may have gone
            return
        self._absent = set(self._group()) - set(members)
        self._count += 1
        opened.set_result(Assembled(f"{self._life}-{self._count}", members))

    def close(self) -> None:
        """This replica averages with nobody any more."""
        if self._opened is not None:
            self._opened.set_exception(Refused("alone"))
            self._opened.exception()
            self._opened = None
        self._waiting.clear()
