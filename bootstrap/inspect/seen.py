"""A run as an observer has seen it, and a finding about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch
    from bootstrap.inspect.observer import Sighting
    from protocol.messages.peers import NodeStats


class Severity(IntEnum):
    FINE = 0
    WARNING = 1  # at risk, or slower than it could be
    ALARM = 2  # nothing is trained, or in vain


@dataclass(frozen=True)
class Finding:
    """A finding; its `sentence` has no capital letter and no full stop, so that it can stand in a list."""

    severity: Severity
    kind: str  # for programs: "stage-empty", "one-replica", …
    sentence: str
    stage: int | None = None


@dataclass(frozen=True)
class Seen:
    """The sightings that an observer has of a run with so many `stages`.

    `empty_for`: the seconds for which an observer that has watched for longer has seen nobody at a stage; what the
    nodes themselves say counts, too. `version` is the observer's own.
    """

    stages: int
    sightings: Sequence[Sighting]
    empty_for: Mapping[int, float] = field(default_factory=dict)
    version: str = ""

    def stats(self, stage: int | None = None) -> list[NodeStats]:
        """Statistics of the nodes that answer."""
        told = [s.stats for s in self.sightings if s.stats is not None]
        return [stats for stats in told if stage is None or stats.stage == stage]

    def serving(self, stage: int) -> list[NodeStats]:
        """The replicas of a stage that take part in training."""
        return [stats for stats in self.stats(stage) if stats.state == "serving"]

    @property
    def is_complete(self) -> bool:
        """True if a replica of the first stage has finished, and none trains on."""
        return not self.serving(0) and any(stats.state == "finished" for stats in self.stats(0))

    @property
    def empty(self) -> list[int]:
        """Stages for lack of which nothing is trained."""
        if self.is_complete:
            return []
        return [stage for stage in range(self.stages) if not self.serving(stage)]
