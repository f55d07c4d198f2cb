"""Asks two peers of the next stage how much they have to do, as `node.pipeline.next_stage` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE
from protocol.ground import PeerId

if TYPE_CHECKING:
    from bootstrap.lab.simulated_swarm.modelled_pipeline import ModelledPipeline, Passing


class Question:
    """Asks two peers how much they have to do. Mutable state: what they told, and whether it is settled."""

    def __init__(self, by: ModelledPipeline, passing: Passing, candidates: Sequence[PeerId]) -> None:
        self._by = by
        self._passing = passing
        self._candidates = candidates
        self._told: dict[PeerId, float | None] = {}
        self._asked = by.peer.world.now

    def ask(self) -> None:
        world, peer = self._by.peer.world, self._by.peer
        deadlines = [self._by.choices.times.deadline_of(candidate) for candidate in self._candidates]
        for candidate, deadline in zip(self._candidates, deadlines, strict=True):
            other = world.peers[candidate]
            world.network.send(peer, other, "questions", MESSAGE, self._reached, candidate)
            world.queue.after(deadline, self._missed, candidate)

    def _reached(self, candidate: PeerId) -> None:
        world, stage = self._by.peer.world, self._by.stage + 1
        other = world.peers[candidate]
        backlog = other.pipeline_at(stage).backlog()
        world.network.send(other, self._by.peer, "questions", MESSAGE, self._answered, candidate, backlog)

    def _answered(self, candidate: PeerId, backlog: float | None) -> None:
        if candidate not in self._told:
            self._by.choices.times.answered(candidate, self._by.peer.world.now - self._asked)
            self._settle(candidate, backlog)

    def _missed(self, candidate: PeerId) -> None:
        if candidate not in self._told:
            self._by.choices.times.missed(candidate)
            self._settle(candidate, None)

    def _settle(self, candidate: PeerId, backlog: float | None) -> None:
        self._told[candidate] = backlog
        if len(self._told) == len(self._candidates):
            told = {peer: seconds for peer, seconds in self._told.items() if seconds is not None}
            world = self._by.peer.world
            self._by.send(self._passing, self._by.choices.chosen(self._candidates, told, world.now))
