"""Findings on stages that lost their state or wait for it: begun anew, waiting, the step fell back. Pure."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from bootstrap.inspect.seen import Finding, Seen, Severity
from node.watch.words import clock_time, waiting_sentence

if TYPE_CHECKING:
    from protocol.messages.peers import NodeStats

NEWS_SECONDS = 3600.0  # for which a setback is a warning; then it is a fact like others
FAR_BEHIND = 10  # times: stages of unequal width may differ in their steps by a few times
LEAST_STEPS = 100  # of another stage, before a stage can be far behind it


def setbacks(seen: Seen) -> list[Finding]:
    """At most one finding of each kind for a stage."""
    found: list[Finding] = []
    for stage in range(seen.stages):
        begun = _begun_anew(seen, stage)
        fell = _fell(seen, stage) or ([] if begun else _far_behind(seen, stage))
        found += [*begun, *_waiting(seen, stage), *fell]
    return found


def _begun_anew(seen: Seen, stage: int) -> list[Finding]:
    """Find a later beginning of the stage's lineage, by the median of its replicas, the lower one of two."""
    replicas = seen.serving(stage)
    number = median_low(stats.beginning for stats in replicas) if replicas else 0
    if not number:
        return []
    times = sorted(
        (s.begun, _clock(s, seen)) for s in replicas if s.beginning == number and s.begun is not None
    )
    begun, now = times[(len(times) - 1) // 2] if times else (None, 0.0)
    at = "" if begun is None else f" at {clock_time(begun, now)}"
    often = f", {number:,} times by now" if number > 1 else ""
    sentence = f"stage {stage} was begun anew{at}{often}: it learns from the start again"
    return [Finding(_severity(now if begun is None else begun, now), "begun-anew", sentence, stage, begun)]


def _waiting(seen: Seen, stage: int) -> list[Finding]:
    """Find a first replica that waits for its stage's state; of several the one that waits for the median step."""
    waiting = [
        (stats.awaited, _clock(stats, seen))
        for stats in seen.stats(stage)
        if stats.state == "joining" and stats.awaited is not None and stats.awaited.stage == stage
    ]
    if not waiting:
        return []
    awaited, now = sorted(waiting, key=lambda each: each[0].step)[(len(waiting) - 1) // 2]
    sentence = waiting_sentence(awaited, now, seen.called).removesuffix(".")
    return [Finding(Severity.WARNING, "waiting", sentence[:1].lower() + sentence[1:], stage, awaited.until)]


def _fell(seen: Seen, stage: int) -> list[Finding]:
    fall = seen.fell.get(stage)
    if fall is None:
        return []
    at = clock_time(fall.time, seen.now)
    sentence = f"stage {stage}: its step fell back from {fall.high:,} to {fall.low:,} at {at}"
    return [Finding(_severity(fall.time, seen.now), "step-fell-back", sentence, stage, fall.time)]


def _far_behind(seen: Seen, stage: int) -> list[Finding]:
    """Find a stage whose step is far behind that of another one, which an observer sees at its first look."""
    steps = {place: _steps(seen, place) for place in range(seen.stages)}
    here, others = (
        steps[stage],
        {place: median_low(told) for place, told in steps.items() if told and place != stage},
    )
    if not here or not others:
        return []
    ahead = max(others, key=lambda place: others[place])
    if others[ahead] < LEAST_STEPS or others[ahead] < FAR_BEHIND * max(here):
        return []
    sentence = (
        f"stage {stage} is at step {max(here):,} beside stage {ahead} at {others[ahead]:,}: it fell back, or was "
        "begun anew"
    )
    return [Finding(Severity.WARNING, "step-fell-back", sentence, stage)]


def _severity(time: float, now: float) -> Severity:
    return Severity.WARNING if now - time < NEWS_SECONDS else Severity.FINE


def _steps(seen: Seen, stage: int) -> list[int]:
    return [stats.step for stats in seen.serving(stage)]


def _clock(stats: NodeStats, seen: Seen) -> float:
    """The wall clock of a node as it answered, by which the times are that it reports."""
    return seen.now if stats.time is None else stats.time
