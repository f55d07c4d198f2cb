"""Estimates the size of a stage from a sample and picks which of its records this node reads, alike everywhere. Pure.

Records of a large stage lie in buckets (`records.announcement`). Every node writes to one and reads a few, another
one at each look, so that views stay random and nobody reads all. The sample under the stage's own key tells how many
replicas there are: a record of level l is in it with probability 2^-l, so it stands for 2^l of them (Horvitz and
Thompson 1952). All read the same sample, and so agree on the level without a word.

A level is a claim. A record counts as 2^l replicas only as far as buckets of its level hold what the sample lets
expect: each bucket has as many records as the sample has of that level. Until one was read, it counts as one replica.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from protocol.records.announcement import MOST_LEVEL
from protocol.records.records import CLOCK_SLACK

WANTED = 64  # records in a bucket, and in the sample
LEAST, MOST = WANTED // 2, WANTED * 2  # in between nobody changes the level, so that it does not flap
GOLDEN = 0.618034  # its multiples, without their whole parts, are spread evenly
SAMPLE_EVERY = 8  # looks at a bucket; the others read it alone
# Turns of which one is used, by the records that a look brings, if they are fewer.
TURNS = {12: 1, 24: 2, 48: 3}
MOST_TURNS = 3  # each record of a small stage is seen again before it is near its end
SHORT = 0.5  # of the records that a bucket should have: with fewer somebody hides them, or the sample is old
# Buckets of a level, the last ones read: the middle one decides, so that no attacker near a single key does.
EXAMINED = 3
DOUBTED = (
    1 / 8
)  # of the reads of buckets go to levels that three buckets did not bear out; before that a half
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
    sample: dict[int, int] = field(default_factory=dict)  # records of the sample, by level
    buckets: dict[int, list[int]] = field(default_factory=dict)  # sizes of the last buckets read, by level

    def sampled(self, levels: Iterable[int]) -> None:
        """Record the levels of all records under the stage's own key."""
        self.sample = dict(Counter(levels))
        kept = {*self.sample, self.level}
        self.buckets = {level: sizes for level, sizes in self.buckets.items() if level in kept}
        self.is_old = False
        self._estimate()

    def bucket_read(self, level: int, records: int) -> None:
        """Record the number of `records` in a bucket of this level."""
        self.buckets[level] = [*self.buckets.get(level, ()), records][-EXAMINED:]
        self.is_old = self.is_short(level, records)
        self._estimate()

    def _estimate(self) -> None:
        self.shares = {level: self._share(level, records) for level, records in self.sample.items()}
        self.estimate = sum(self.shares.values())
        unread = sum(records for level, records in self.sample.items() if level and level not in self.buckets)
        if unread <= DOUBTED * sum(self.sample.values()):
            self.level = level_of(self.estimate, self.level)

    def _share(self, level: int, records: int) -> float:
        """Estimate the replicas of a level from the number of its `records` in the sample.

        Each record stands for 2^level replicas. If the median bucket of the level has far fewer records than the
        sample, the bucket's size counts instead; without a bucket each record is one replica.
        """
        sizes = sorted(self.buckets.get(level, [0]))
        size = sizes[len(sizes) // 2]
        per_bucket = records if size >= SHORT * records else size
        return float(max(records, per_bucket * 2**level))

    def looked(self, since: Sequence[float], now: float) -> None:
        """Record the start times (wall clock) of the replicas that one read returned."""
        young = sum(now - YOUNG_SECONDS < began <= now + CLOCK_SLACK for began in since)
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
        records = self.estimate / 2 ** max(self.levels, default=0)
        return next((turns for fewer, turns in TURNS.items() if records < fewer), MOST_TURNS)

    def is_short(self, level: int, records: int) -> bool:
        """Return whether a bucket of this level shows far fewer records than the sample lets expect."""
        return records < SHORT * self.sample.get(level, 0)

    @property
    def is_sample_due(self) -> bool:
        return not self.levels or self.looks % SAMPLE_EVERY == 0 or self.is_old

    @property
    def levels(self) -> dict[int, float]:
        """Replicas by the levels at which there are buckets; level 0 is the stage's own key."""
        return {level: n for level, n in self.shares.items() if level and n > self.sample.get(level, 0)}

    @property
    def doubted(self) -> dict[int, int]:
        """Records of the sample by the levels that no bucket bears out, and the level of this node itself."""
        known, found = self.levels, {self.level: 0} | self.sample
        return {level: max(1, records) for level, records in found.items() if level and level not in known}

    def next_bucket(self, reader: str) -> tuple[int, int] | None:
        """Return the level and number of the bucket that `reader` reads at this look; None without buckets to read.

        Each reader goes through the buckets in its own order. While replicas change from one level to another, the
        reads of a level are in proportion to its replicas.
        """
        self.looks += 1
        if not self._wants_bucket():
            return None
        weights = self._weights()
        digest = hashlib.sha256(reader.encode()).digest()
        start, stride = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]) | 1
        level = _drawn(weights, (self.looks * GOLDEN) % 1.0)
        return level, (start + self.looks * stride) % 2**level

    def _is_examined(self) -> bool:
        """Return whether enough buckets of each doubted level were read."""
        return all(len(self.buckets.get(level, ())) >= EXAMINED for level in self.doubted)

    def _wants_bucket(self) -> bool:
        """Return whether this look is for a bucket; if all levels are doubted and examined, few looks are."""
        if self.levels:
            return True
        return bool(self.doubted) and (not self._is_examined() or self.looks % SAMPLE_EVERY == 0)

    def _weights(self) -> dict[int, float]:
        """Return the weight of each level for the next read.

        A known level weighs its replicas. Of all reads the doubted levels share `DOUBTED`, or a half until they are
        examined, in proportion to their records in the sample.
        """
        known, doubted = self.levels, self.doubted
        of_doubted = DOUBTED if self._is_examined() else 0.5
        total = (sum(known.values()) or 1.0) * of_doubted / (1 - of_doubted)
        records = sum(doubted.values())
        return known | {level: total * n / records for level, n in doubted.items()}


def _drawn(weights: Mapping[int, float], place: float) -> int:
    """Draw a level with these weights; `place`, between 0 and 1, is the random number."""
    ends = list(accumulate(weights.values()))
    return list(weights)[min(bisect_right(ends, place * ends[-1]), len(ends) - 1)]
