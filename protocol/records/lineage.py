"""The lineage of a stage's weights: one history from one beginning. Pure.

Weights that began apart are no copies of one model, however far each has come: their mean is noise. So what travels
with weights (records, checkpoints, exchanges, downloads) says which beginning they come from. Steps decide nothing
between two lineages, since anybody can claim a step: the older one wins, once its past is proved (`node.state.past`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

SAME_SECONDS = 60.0  # first replicas that begin this close to each other, or
SAME_LIFETIMES = 2.0  # record lifetimes, have not seen each other and have the same weights
MOST_BEGINNINGS = 1_000_000  # no stage has begun more often; one that says so is not believed


@dataclass(frozen=True, order=True)
class Lineage:
    """A beginning of a stage's weights, ordered from the oldest.

    `beginning` is 0 for the run's seed or checkpoint, and one more each time that the stage is begun anew; `begun` is
    the wall clock in seconds at which its first replica began, 0 where that is not known (before version 0.3).
    """

    beginning: int = 0
    begun: float = 0.0

    def identity(self, run_id: str, stage: int) -> str:
        """The name of the lineage, 16 hexadecimal digits: of replicas that begin at once the same."""
        return hashlib.sha256(f"noloco lineage {run_id}/{stage}/{self.beginning}".encode()).hexdigest()[:16]

    def is_same(self, other: Lineage, lifetime: float) -> bool:
        """Return whether both are one history, where records live for `lifetime` seconds."""
        apart = abs(self.begun - other.begun)
        is_unknown = not (self.begun and other.begun)
        return self.beginning == other.beginning and (is_unknown or apart <= together_within(lifetime))

    def is_before(self, other: Lineage, lifetime: float) -> bool:
        """Return whether this one is another history, and the older one."""
        return self < other and not self.is_same(other, lifetime)

    def joined(self, other: Lineage) -> Lineage:
        """The lineage of weights made from both, which are the same one: it began when the first of them did."""
        known = [lineage.begun for lineage in (self, other) if lineage.begun]
        return replace(self, begun=min(known, default=0.0))

    def next(self, now: float) -> Lineage:
        """The lineage of a stage that is begun anew at `now`, after this one."""
        return Lineage(min(self.beginning + 1, MOST_BEGINNINGS), now)

    def facts(self) -> dict[str, str]:
        """The lineage as a checkpoint has it."""
        return {"beginning": str(self.beginning), "begun": str(self.begun)}

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> Lineage:
        """Read a checkpoint's facts; those of earlier versions have none. Raises `ValueError`."""
        beginning, begun = int(facts.get("beginning", 0)), float(facts.get("begun", 0.0))
        if beginning < 0 or not 0 <= begun < math.inf:
            raise ValueError(f"no lineage is {beginning} of {begun}")
        return cls(beginning, begun)


UNDATED = Lineage()


def together_within(lifetime: float) -> float:
    """Seconds within which two first replicas of a stage begin the same lineage."""
    return max(SAME_SECONDS, SAME_LIFETIMES * lifetime)
