"""The modelled wires: what a link costs, and who cannot hear whom at present."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from protocol.ground import PeerId
from protocol.windows import window

BULK_BYTES = 2048  # a chunk of as much is of weights or activations, not a question or an answer


@dataclass(frozen=True)
class Link:
    """One direction between two peers."""

    latency: float = 0.0  # seconds, one way
    bandwidth: float = math.inf  # bytes per second, taken from the sender's uplink
    jitter: float = 0.0  # seconds; each chunk is late by a random part of it, but never overtakes another
    open_loss: float = 0.0  # probability that opening a stream fails
    write_loss: float = 0.0  # probability that a write breaks its stream instead of arriving
    bulk: float = 1.0  # a chunk of `BULK_BYTES` counts so many times: a small model stands for a large one

    def seconds(self, size: int) -> float:
        """The seconds that a chunk of `size` bytes keeps the uplink busy."""
        return size * (self.bulk if size >= BULK_BYTES else 1.0) / self.bandwidth


LinkModel: TypeAlias = Callable[[PeerId, PeerId], Link]  # (sender, receiver)


class Faults:
    """Faults: who is frozen, who is on the other side of a partition, and what waits for that to end."""

    def __init__(self) -> None:
        self._frozen: set[PeerId] = set()
        self._side: dict[PeerId, int] = {}
        self._blocked: list[Callable[[], None]] = []

    @window
    def __repr__(self) -> str:
        return f"Frozen: {len(self._frozen)} | In parts: {len(self._side)} | Waiting: {len(self._blocked)}"

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
        """Return whether nothing gets from `a` to `b` at present."""
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
