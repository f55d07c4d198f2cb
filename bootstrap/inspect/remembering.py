"""A watcher's memory from look to look: stages without anybody, steps that fell back, the best loss. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootstrap.inspect.losses import best_told
from bootstrap.inspect.seen import Fall, Seen

if TYPE_CHECKING:  # it imports torch
    from bootstrap.inspect.observer import Sighting
    from protocol.ground import PeerId
    from protocol.messages.peers import LossBest

LEAST_FALL = 10  # steps: a newcomer with the state of a replica that has left may be a few behind it
MOST_PEERS = 4_096  # of a stage whose steps are remembered


class Memory:
    """A watcher's memory of a run with so many `stages`.

    Mutable state: since which wall clock nobody has been seen at a stage; the best loss; the steps of each stage.
    """

    def __init__(self, stages: int, version: str, total_steps: int = 0) -> None:
        """`version` is the watcher's: nodes with an older one are reported; `total_steps` 0 is an unknown number."""
        self._stages = stages
        self._total_steps = total_steps
        self._version = version
        self._empty_since: dict[int, float] = {}
        self._best: LossBest | None = None
        self._steps = [_Steps() for _ in range(stages)]

    def look(self, sightings: Sequence[Sighting], now: float) -> Seen:
        """Return the sightings at wall clock `now` with what is remembered, and remember them."""
        seen = Seen(self._stages, sightings)
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in seen.empty}
        best = best_told(seen.stats())
        if best is not None and (self._best is None or best.loss < self._best.loss):
            self._best = best
        for stage, steps in enumerate(self._steps):
            steps.look(
                {
                    sighting.member.peer: sighting.stats.step
                    for sighting in sightings
                    if sighting.stats is not None
                    and sighting.stats.stage == stage
                    and sighting.stats.state == "serving"
                },
                now,
            )
        return Seen(
            self._stages,
            sightings,
            empty_for={stage: now - since for stage, since in self._empty_since.items()},
            version=self._version,
            now=now,
            fell={stage: steps.fall for stage, steps in enumerate(self._steps) if steps.fall is not None},
            best=self._best,
            total_steps=self._total_steps,
        )


class _Steps:
    """The steps of one stage.

    Mutable state: the highest step at the last look that showed a replica, the last step of each replica, and the
    fall that is not made up for yet.
    """

    def __init__(self) -> None:
        self._high = 0
        self._of: dict[PeerId, int] = {}
        self.fall: Fall | None = None

    def look(self, steps: dict[PeerId, int], now: float) -> None:
        """Compare the serving replicas' steps with earlier ones.

        The stage fell back if its highest step is lower and no replica kept its own: where one did, others have left
        that were further.
        """
        if not steps:
            return
        high = max(steps.values())
        has_kept = any(step >= self._of[peer] for peer, step in steps.items() if peer in self._of)
        if not has_kept and self._high - high >= LEAST_FALL:
            before = max(self._high, self.fall.high if self.fall else 0)
            self.fall = Fall(before, high, now)
        elif self.fall is not None and high >= self.fall.high:
            self.fall = None
        self._high = high
        self._of = (self._of if len(self._of) < MOST_PEERS else {}) | steps
