"""The tokens that a swarm has trained on, also those of nodes that were restarted: each counts from zero again."""

from __future__ import annotations

from collections.abc import Iterable

from bootstrap.looking.observer import Sighting
from protocol.transport.base import PeerId


class TokenCount:
    """Mutable state: what each node of the first stage said last, and what it had trained on in earlier lives.

    What a node does between the last look and its death is not counted.
    """

    def __init__(self) -> None:
        self._said: dict[PeerId, int] = {}
        self._before: dict[PeerId, int] = {}

    @property
    def total(self) -> int:
        return sum(self._said.values()) + sum(self._before.values())

    def note(self, sightings: Iterable[Sighting]) -> None:
        for sighting in sightings:
            if sighting.stats is not None and sighting.stats.stage == 0:
                self._note_node(sighting.member.peer, sighting.stats.tokens)

    def _note_node(self, peer: PeerId, tokens: int) -> None:
        last = self._said.get(peer, 0)
        if tokens < last:
            self._before[peer] = self._before.get(peer, 0) + last
        self._said[peer] = tokens
