"""Curves from before anybody watched, from what members have kept of themselves. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from bootstrap.dashboard.board import Point
from protocol.ground import PeerId
from protocol.messages.peers import HistoryPoint

MOST_RECALLED = 240  # points
LONGEST = 3650 * 86_400.0  # seconds; who says that it is older has a wrong clock
STALE_POINTS = 3  # steps of the curve for which a member's last point counts, in medians and speeds


def recalled(histories: Mapping[PeerId, Sequence[HistoryPoint]], now: float) -> list[Point]:
    """The run before wall clock `now`, as the points of an even curve; members that have left are not in it.

    As `point_of` makes them: medians over those who tell, sums over the first stage.
    """
    kept = {
        peer: sorted((p for p in points if now - LONGEST < p.time < now), key=lambda point: point.time)
        for peer, points in histories.items()
    }
    times = [points[0].time for points in kept.values() if points]
    if not times:
        return []
    first = min(times)
    step = (now - first) / MOST_RECALLED
    return [_at(first + (i + 1) * step, step, list(kept.values())) for i in range(MOST_RECALLED - 1)]


def _at(time: float, step: float, histories: Sequence[Sequence[HistoryPoint]]) -> Point:
    tokens, fresh = 0, []
    for points in histories:
        place = bisect_right(points, time, key=lambda point: point.time)
        if place:
            latest = points[place - 1]
            tokens += _tokens(latest, points[place] if place < len(points) else latest, time)
            if time - latest.time <= STALE_POINTS * max(step, _interval(points)):
                fresh.append(latest)
    return Point(
        time=round(time, 3),
        tokens=tokens,
        loss=_median(point.loss for point in fresh),
        rate=round(math.fsum(point.tokens_per_second for point in fresh if point.stage == 0), 3),
        spread=_median(point.spread for point in fresh),
        expected=_median(point.expected_spread for point in fresh),
        members=len(fresh),
    )


def _tokens(before: HistoryPoint, after: HistoryPoint, time: float) -> int:
    """Tokens of the first stage, at a time between two points."""
    if before.stage:
        return 0
    if after.stage or after.time <= before.time:
        return before.tokens
    share = (time - before.time) / (after.time - before.time)
    return round(before.tokens + share * (after.tokens - before.tokens))


def _interval(points: Sequence[HistoryPoint]) -> float:
    return (points[-1].time - points[0].time) / (len(points) - 1) if len(points) > 1 else 0.0


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
