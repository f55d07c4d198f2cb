"""Estimates the size of a stage from a sample and picks which of its records this node reads, alike everywhere. Pure.

Records of a large stage lie in buckets (`protocol.announcement`). Every node writes to one and reads a few, another
one at each look, so that views stay random and nobody reads all. The sample under the stage's own key tells how many
replicas there are: a record of level l is in it with probability 2^-l, so it stands for 2^l of them (Horvitz and
Thompson 1952). All read the same sample, and so agree on the level without a word.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol.announcement import MOST_LEVEL

WANTED = 64  # records in a bucket, and in the sample
LEAST, MOST = WANTED // 2, WANTED * 2  # in between nobody changes the level, so that it does not flap
GOLDEN = 0.618034  # its multiples, without their whole parts, are spread evenly
SAMPLE_EVERY = 8  # looks at a bucket; the others read it alone
# Turns of which one is used, by the records that a look brings, if they are fewer.
TURNS = {12: 1, 24: 2, 48: 3}
MOST_TURNS = 3  # each record of a small stage is seen again before it is near its end
SHORT = 0.5  # of the records that a bucket should have: with fewer somebody hides them, or the sample is old
# Where many are new, as when a crowd comes, each turn is used: else it would meet the few that everybody knows.
YOUNG_SECONDS, RESTLESS = 60.0, 0.1


def level_of(replicas: float, level: int) -> int:
    """Return the level for a stage of so many `replicas`, which are in 2^level buckets at present."""
    if (level == 0 and replicas <= MOST) or LEAST <= replicas / 2**level <= MOST:
        return level
    return min(MOST_LEVEL, max(0, round(math.log2(max(replicas, 1.0) / WANTED))))


@dataclass
class StageSize:
    """Estimates the size of a stage from a sample of its records and says which of them to read next."""

    estimate: float = 0.0  # replicas
    level: int = 0  # at which a replica should announce itself
    shares: dict[int, float] = field(
        default_factory=dict
    )  # replicas by the level at which they announce themselves
    looks: int = 0  # at the stage's own key or a bucket
    turns: int = 0  # to look, also those that were left out
    is_restless: bool = False  # many of those that the last look showed were new
    is_old: bool = False  # the sample, by what a bucket showed

    def sampled(self, levels: Iterable[int]) -> None:
        """The levels of all records under the stage's own key."""
        self.shares = {}
        for level in levels:
            self.shares[level] = self.shares.get(level, 0.0) + 2.0**level
        self.estimate, self.is_old = sum(self.shares.values()), False
        self.level = level_of(self.estimate, self.level)

    def looked(self, since: Sequence[float], now: float) -> None:
        """Note since when those serve that one look showed, by the wall clock."""
        young = sum(began > now - YOUNG_SECONDS for began in since)
        self.is_restless = young > RESTLESS * len(since)

    def is_turn_left_out(self) -> bool:
        """Return whether to read nothing at this turn: the more records a look brings, the fewer looks it takes."""
        self.turns += 1
        return (self.turns - 1) % self.every > 0  # the first one is used

    @property
    def every(self) -> int:
        """The turns of which one is used."""
        if self.is_restless:
            return 1
        records = self.estimate / 2 ** max(self._levels, default=0)
        return next((turns for fewer, turns in TURNS.items() if records < fewer), MOST_TURNS)

    def is_short(self, level: int, records: int) -> bool:
        """Return whether a bucket of this level shows far fewer records than the sample lets expect."""
        return records < SHORT * self.shares.get(level, 0.0) / 2.0**level

    @property
    def is_sample_due(self) -> bool:
        return not self._levels or self.looks % SAMPLE_EVERY == 0 or self.is_old

    @property
    def _levels(self) -> list[int]:
        """The levels of the buckets; level 0 is the stage's own key."""
        return [level for level in self.shares if level]

    def next_bucket(self, reader: str) -> tuple[int, int] | None:
        """The level and number of the bucket that `reader` reads at this look; None where there are no buckets.

        A reader goes through the buckets in an order of its own. While replicas change from one level to another,
        each level has its turn as often as it has replicas.
        """
        self.looks += 1
        if not self._levels:
            return None
        digest = hashlib.sha256(reader.encode()).digest()
        start, stride = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]) | 1
        level = self._level_at((self.looks * GOLDEN) % 1.0)
        return level, (start + self.looks * stride) % 2**level

    def _level_at(self, place: float) -> int:
        """A level drawn by the replicas of each; `place` is between 0 and 1."""
        levels = self._levels
        left = place * sum(self.shares[level] for level in levels)
        for level in levels:
            left -= self.shares[level]
            if left < 0:
                break
        return level
