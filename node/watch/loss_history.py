"""The course of the training loss in the last hour, in at most `BUCKETS` numbers, and its best so far. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, variance

from protocol.messages.peers import LossBest, LossTrend

HOUR = 3600.0
BUCKETS = 64
LEAST = 8  # buckets before there is a trend
CERTAIN = 3.0  # standard errors of the difference
QUARTILE = 0.6745  # deviations between median and lower quartile of a normal distribution
RECENT_STEPS = 30  # whose mean people are shown: that of one step, of few sequences, is mostly chance
BEST_STEPS = 100  # whose mean may be the best: the lowest of many shorter ones would be mostly luck
JUMP_ERRORS = (
    5.0  # standard errors of the difference: three are noise, two the luck of the lowest of thousands
)
LEAST_JUMP = 0.05  # of the best loss: less is drift of the data, or what a rise is found by


@dataclass(frozen=True)
class _Bucket:
    """The mean loss of so many steps, the last of which ended at `time`."""

    time: float
    loss: float
    steps: int = 1


class LossHistory:
    """Keeps the training loss of the last hour in a bounded number of buckets.

    Mutable state: buckets of steps one after another, each of about as many steps, at most an hour old; the last
    steps' losses; the lowest mean of `BEST_STEPS` steps in a row, fewer at the beginning.
    """

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._size = 1  # steps of a bucket
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._smooth: deque[float] = deque(maxlen=BEST_STEPS)  # those that are numbers
        self._best: _Bucket | None = None

    def note(self, time: float, loss: float) -> None:
        """Note the loss of a step that ended at `time`, in seconds of any clock that nobody sets."""
        self._recent.append(loss)
        self._note_best(time, loss)
        buckets = self._buckets
        if buckets and buckets[-1].steps < self._size:
            buckets[-1] = _together(buckets[-1], _Bucket(time, loss))
        else:
            buckets.append(_Bucket(time, loss))
        while buckets[0].time < time - HOUR:
            buckets.pop(0)
        if len(buckets) > BUCKETS:
            self._buckets = [_together(*buckets[i : i + 2]) for i in range(0, len(buckets), 2)]
            self._size *= 2

    def recent(self) -> float | None:
        """The mean of the last `RECENT_STEPS` steps; the last one itself if that is no number; None before any."""
        if not self._recent or not math.isfinite(self._recent[-1]):
            return self._recent[-1] if self._recent else None
        return fmean(filter(math.isfinite, self._recent))

    def _note_best(self, time: float, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self._smooth.append(loss)
        if len(self._smooth) >= RECENT_STEPS:
            self._take_best(_Bucket(time, fmean(self._smooth), len(self._smooth)))

    def _take_best(self, bucket: _Bucket) -> None:
        if self._best is None or bucket.loss < self._best.loss:
            self._best = bucket

    def best(self, time: float, wall: float) -> LossBest | None:
        """The lowest mean so far; None before `RECENT_STEPS` steps.

        `wall` is the wall clock at `time`, which is by the clock of `note`.
        """
        if self._best is None:
            return None
        apart = [(late - early) ** 2 for early, late in pairwise(filter(math.isfinite, self._recent))]
        # of one step; differences of neighbours do not count a jump, or a fall, for noise
        square = fmean(apart) / 2 if apart else 0.0
        error = math.sqrt(square / (len(apart) + 1) + square / self._best.steps)
        return LossBest(self._best.loss, wall - (time - self._best.time), error)

    def recall(self, best: LossBest, time: float, wall: float) -> None:
        """Take up the best of an earlier life of the node, unless this life has a lower one. Times as of `best`."""
        self._take_best(_Bucket(time - (wall - best.time), best.loss, BEST_STEPS))

    def trend(self) -> LossTrend | None:
        """The trend of the last quarter against the first, or against the lowest if it is higher than that for
        certain.

        None while there is too little.
        """
        if len(self._buckets) < LEAST:
            return None
        size = len(self._buckets) // 4
        *before, last = (self._buckets[i * size : (i + 1) * size or None] for i in range(4))
        first, lowest = before[0], min(before, key=_mean)
        from_lowest = _trend(lowest, last)
        rises = from_lowest.now - from_lowest.before > CERTAIN * from_lowest.error
        return from_lowest if rises else _trend(first, last)


def has_jumped(loss: float | None, best: LossBest | None) -> bool:
    """True if the present loss is above the best one by more than noise and luck explain."""
    if loss is None or best is None:
        return False
    return loss - best.loss > JUMP_ERRORS * best.error + LEAST_JUMP * abs(best.loss)


def _trend(some: Sequence[_Bucket], last: Sequence[_Bucket]) -> LossTrend:
    error = math.sqrt(sum(variance(b.loss for b in part) / len(part) for part in (some, last)))
    return LossTrend(last[-1].time - some[0].time, _mean(some), _mean(last), error)


def _mean(buckets: Sequence[_Bucket]) -> float:
    return fmean(bucket.loss for bucket in buckets)


def _together(one: _Bucket, other: _Bucket | None = None) -> _Bucket:
    if other is None:
        return one
    steps = one.steps + other.steps
    return _Bucket(other.time, (one.loss * one.steps + other.loss * other.steps) / steps, steps)


def centre_and_deviation(losses: Sequence[float]) -> tuple[float, float]:
    """The median, and the deviation by those below it alone: who does wrong is above. At least one loss."""
    ordered = sorted(losses)
    centre = median(ordered)
    return centre, (centre - ordered[len(ordered) // 4]) / QUARTILE
