"""The modelled wires: what a link costs, who cannot hear whom at present, and a peer's shared uplink."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from protocol.transport.base import PeerId


@dataclass(frozen=True)
class Link:
    """One direction between two peers."""

    latency: float = 0.0  # seconds, one way
    bandwidth: float = math.inf  # bytes per second, taken from the sender's uplink
    jitter: float = 0.0  # seconds; each chunk is late by a random part of it, but never overtakes another
    open_loss: float = 0.0  # probability that opening a stream fails
    write_loss: float = 0.0  # probability that a write breaks its stream instead of arriving


LinkModel: TypeAlias = Callable[[PeerId, PeerId], Link]  # (sender, receiver)


class Sender(Protocol):
    """One direction of a stream, with chunks waiting for the uplink."""

    def transmit(self) -> float:
        """Send the next chunk now; returns the seconds that the uplink is busy with it."""

    def waiting(self) -> bool:
        """Whether another chunk waits."""


class Uplink:
    """A peer's sending side: the chunks of all its streams leave one after another, stream by stream in turn.

    So a small message waits behind one chunk of each bulk transfer, not behind whole transfers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._free_at = -math.inf
        self._turns: deque[Sender] = deque()

    def enqueue(self, sender: Sender) -> None:
        """Called when the first chunk of `sender` begins to wait."""
        self._turns.append(sender)
        if len(self._turns) == 1:
            if self._free_at <= self._loop.time():
                self._next()
            else:
                self._loop.call_at(self._free_at, self._next)

    def _next(self) -> None:
        while self._turns:
            sender = self._turns.popleft()
            if not sender.waiting():  # its stream broke meanwhile
                continue
            duration = sender.transmit()
            if sender.waiting():
                self._turns.append(sender)
            if duration > 0:
                self._free_at = self._loop.time() + duration
                if self._turns:
                    self._loop.call_at(self._free_at, self._next)
                return


class Faults:
    """Who is frozen, who is on the other side of a partition, and what waits for that to end."""

    def __init__(self) -> None:
        self._frozen: set[PeerId] = set()
        self._side: dict[PeerId, int] = {}
        self._blocked: list[Callable[[], None]] = []

    def freeze(self, peer: PeerId) -> None:
        self._frozen.add(peer)

    def thaw(self, peer: PeerId) -> None:
        self._frozen.discard(peer)
        self._retry()

    def partition(self, groups: Sequence[Iterable[PeerId]]) -> None:
        """Peers of different groups do not hear each other; those in no group form a group of their own."""
        self._side = {peer: side for side, group in enumerate(groups, start=1) for peer in group}
        self._retry()

    def heal(self) -> None:
        self.partition([])

    def frozen(self, peer: PeerId) -> bool:
        return peer in self._frozen

    def side(self, peer: PeerId) -> int:
        return self._side.get(peer, 0)

    def between(self, a: PeerId, b: PeerId) -> bool:
        """Whether nothing gets from `a` to `b` at present."""
        if self._frozen and (a in self._frozen or b in self._frozen):
            return True
        return bool(self._side) and self.side(a) != self.side(b)

    def call_when_changed(self, callback: Callable[[], None]) -> None:
        """Call once, when something was repaired; what is still blocked then has to ask again."""
        self._blocked.append(callback)

    async def changed(self) -> None:
        event = asyncio.Event()
        self.call_when_changed(event.set)
        await event.wait()

    def _retry(self) -> None:
        blocked, self._blocked = self._blocked, []
        for callback in blocked:
            callback()
