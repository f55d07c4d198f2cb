"""The tokens that a swarm has trained on, also those of nodes that were restarted."""

from __future__ import annotations

from collections.abc import Iterable

from bootstrap.inspect.observer import Sighting
from protocol.transport.base import PeerId


class TokenCount:
    """Mutable state: what each node of the first stage said last, and what it had trained on in earlier lives.

    A node that goes on from its checkpoint goes on with its count; what it had done since then is lost to the model,
    and so to this. One that takes others' state counts from zero: its earlier lives are in the model.
    """

    def __init__(self) -> None:
        self._said: dict[PeerId, int] = {}
        self._before: dict[PeerId, int] = {}

    @property
    def total(self) -> int:
        return sum(self._said.values()) + sum(self._before.values())

    def note(self, sightings: Iterable[Sighting]) -> None:
        for sighting in sightings:
            stats = sighting.stats
            if (
                stats is not None and stats.stage == 0 and stats.state != "joining"
            ):  # it may be reading its count
                self._note_node(sighting.member.peer, stats.tokens)

    def _note_node(self, peer: PeerId, tokens: int) -> None:
        last = self._said.get(peer, 0)
        if tokens < last / 2:  # a checkpoint is not that old
            self._before[peer] = self._before.get(peer, 0) + last
        self._said[peer] = tokens
