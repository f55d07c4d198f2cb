"""The verdict on the loss: whether it falls, rises, or has jumped above the best so far. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from bootstrap.inspect.seen import Finding, Seen, Severity
from node.watch.loss_history import CERTAIN, has_jumped
from node.watch.words import duration, jump_sentence

if TYPE_CHECKING:
    from protocol.messages.peers import LossBest, LossTrend, NodeStats

MEDIAN_ERROR = 1.25  # of a median of normal numbers, in times that of their mean
LEAST_RISE = 0.005  # of the loss: less is nothing to worry about


def loss_findings(seen: Seen) -> list[Finding]:
    """One finding on the loss; none while nobody knows enough."""
    trends = [stats.trend for stats in seen.stats() if stats.trend is not None]
    if (jump := _jump(seen)) is not None:
        loss, best = jump
        severity = Severity.ALARM if trends and _rises(trends) else Severity.WARNING
        return [Finding(severity, "loss-jumped", jump_sentence(loss, best, seen.now), time=best.time)]
    if not trends:
        return []
    before, now = _ends(trends)
    digits = 2 if abs(now - before) > 0.01 else 4
    change = f"{before:.{digits}f} → {now:.{digits}f} in the last {_span(trends)}"
    if _rises(trends):
        return [Finding(Severity.ALARM, "loss-rises", f"the loss rises: {change}")]
    if _is_certain(trends) and now < before:
        return [Finding(Severity.FINE, "learning", f"learning: {change}")]
    return [Finding(Severity.FINE, "learning", f"the loss does not change for certain: {change}")]


def best_told(told: Iterable[NodeStats]) -> LossBest | None:
    """The best loss so far by the median of the nodes that know one, the higher one of two; None without any."""
    known = sorted(stats.best for stats in told if stats.best is not None)
    return known[len(known) // 2] if known else None


def _jump(seen: Seen) -> tuple[float, LossBest] | None:
    """The present loss and the best so far, by the median of the nodes that know both; None without a jump.

    Of two nodes the one with the larger difference counts: a replica that came after the jump knows nothing of it.
    """
    known = [
        (stats.loss, _lower(stats.best, seen.best))
        for stats in seen.stats()
        if stats.loss is not None and stats.best is not None
    ]
    if not known:
        return None
    loss, best = sorted(known, key=lambda pair: pair[0] - pair[1].loss)[len(known) // 2]
    return (loss, best) if has_jumped(loss, best) else None


def _lower(told: LossBest, remembered: LossBest | None) -> LossBest:
    """The lower one of both; the noise of the present loss is the node's."""
    if remembered is None or told.loss <= remembered.loss:
        return told
    return remembered._replace(error=told.error)


def _ends(trends: Sequence[LossTrend]) -> tuple[float, float]:
    """Return (loss before, loss now), the medians: one that lies moves nothing."""
    return median(trend.before for trend in trends), median(trend.now for trend in trends)


def _is_certain(trends: Sequence[LossTrend]) -> bool:
    before, now = _ends(trends)
    widened = MEDIAN_ERROR if len(trends) > 2 else 1.0
    error = widened * median(trend.error for trend in trends) / math.sqrt(len(trends))
    return abs(now - before) > CERTAIN * error


def _rises(trends: Sequence[LossTrend]) -> bool:
    before, now = _ends(trends)
    return _is_certain(trends) and now - before > LEAST_RISE * abs(before)


def _span(trends: Sequence[LossTrend]) -> str:
    seconds = median(trend.seconds for trend in trends)
    return "hour" if abs(seconds - 3600) < 300 else duration(seconds)
