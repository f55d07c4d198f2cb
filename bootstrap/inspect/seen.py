"""A run as an observer has seen it, and a finding about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from node.watch.words import called_among

if TYPE_CHECKING:  # it imports torch
    from bootstrap.inspect.kept_copies import KeptCopy
    from bootstrap.inspect.observer import Sighting
    from protocol.messages.peers import LossBest, NodeStats
    from protocol.records.announcement import Announcement


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
    time: float | None = None  # wall clock at which it came about, where the sentence has it


class Fall(NamedTuple):
    """A stage's step that was lower than before when a watcher looked at `time` (wall clock)."""

    high: int
    low: int
    time: float


@dataclass(frozen=True)
class Seen:
    """The sightings that an observer has of a run with so many `stages`.

    `empty_for`: the seconds for which an observer that has watched for longer has seen nobody at a stage; what the
    nodes themselves say counts, too. `version` is the observer's own, `now` its wall clock. `fell` and `best` are
    what it remembers of earlier looks: stages whose step fell back, and the best loss. `copies`: by stage, a copy
    that a peer keeps of one that nobody serves. `foreign`: the records of members that speak another protocol.
    """

    stages: int
    sightings: Sequence[Sighting]
    empty_for: Mapping[int, float] = field(default_factory=dict)
    version: str = ""
    now: float = 0.0
    fell: Mapping[int, Fall] = field(default_factory=dict)
    best: LossBest | None = None
    copies: Mapping[int, KeptCopy] = field(default_factory=dict)
    foreign: Sequence[Announcement] = ()
    total_steps: int = 0  # of the run; 0 where they are not known

    def stats(self, stage: int | None = None) -> list[NodeStats]:
        """Statistics of the nodes that answer."""
        told = [s.stats for s in self.sightings if s.stats is not None]
        return [stats for stats in told if stage is None or stats.stage == stage]

    def serving(self, stage: int) -> list[NodeStats]:
        """The replicas of a stage that take part in training."""
        return [stats for stats in self.stats(stage) if stats.state == "serving"]

    def called(self, peer: str) -> str:
        """Name the peer for people, as `called_among` all members that were seen."""
        names = ((one.member.peer, one.member.announcement.name) for one in self.sightings)
        return called_among(names, peer)

    @property
    def is_over(self) -> bool:
        """True if a replica of the first stage has finished, and none trains on.

        Where the first stage's replicas have left since, those of other stages count if all of them have finished.
        """
        if told := self.stats(0):
            return not self.serving(0) and any(stats.state == "finished" for stats in told)
        return {stats.state for stats in self.stats()} == {"finished"}

    @property
    def empty(self) -> list[int]:
        """Stages for lack of which nothing is trained."""
        if self.is_over:
            return []
        return [stage for stage in range(self.stages) if not self.serving(stage)]
