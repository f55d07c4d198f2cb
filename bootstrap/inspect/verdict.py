"""The meaning of a swarm's numbers, in sentences: what stands still, what is at risk, whether it learns. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from bootstrap.inspect.losses import loss_findings
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.setbacks import setbacks
from node.watch.words import ago, duration, word
from protocol.rpc.compatibility import order_of
from protocol.version import PROTOCOL

if TYPE_CHECKING:  # it imports torch
    from protocol.messages.peers import NodeStats

SLOW = 1.5  # times what the poorest stage can do, all others can: they wait for it
IDLE = 0.8  # of the time at most they compute then
# Estimates of the spread rest on eight meetings for each replica, and the theory takes their progress for
# independent: a third to three times as far apart as it says is usual.
SPREAD_BAND = (1 / 3, 3.0)
MOST_TIMES = 1e6  # the theory's spread, as far as it is told
ENOUGH_ROUNDS = 8  # before that an estimate rests on fewer meetings, and says nothing yet
CLOCK_APART, LEAST_CLOCKS = 5.0, 2  # seconds, of which an answer may take some; clocks beside the observer's
MOST_VERSIONS = 5  # that are named
MOST_AGO = 365 * 86_400.0  # seconds for which a copy has been kept, as far as it is told: a stranger wrote it
LEAST_MICROBATCH = 1e-9  # seconds: nobody computes one in less


def verdict(seen: Seen) -> list[Finding]:
    """All that is to be said, the worst first; at least one sentence."""
    if seen.is_over:
        return _by_severity([_end(seen), *_versions(seen), *_protocols(seen), *_silent(seen)])
    found = [*_empty_stages(seen), *_last_replicas(seen), *_spreads(seen), *_versions(seen), *_silent(seen)]
    found += _protocols(seen)
    found += [*setbacks(seen), *_clocks(seen), *_disks(seen)]
    if not seen.empty:
        learns = loss_findings(seen)
        found += [*_slow_stage(seen), *(learns or [_trains(seen)])]
    return _by_severity(found)


def _end(seen: Seen) -> Finding:
    """Return "complete" where all steps are done, else "stopped", with the step at which the nodes ended.

    Where the run's number of steps is not known, nobody can say that they are done.
    """
    step = max((stats.step for stats in seen.stats(0) or seen.stats()), default=0)
    if step >= seen.total_steps > 0:
        return Finding(Severity.FINE, "complete", "the run is complete; its nodes serve the model")
    of = f" of {seen.total_steps:,}" if seen.total_steps else ", of how many is not known here"
    return Finding(
        Severity.FINE, "stopped", f"training has stopped at step {step:,}{of}; its nodes serve the model"
    )


def in_a_word(found: Iterable[Finding]) -> str:
    """ "finished", "stopped" before its end, "standing still", "degraded" or "healthy"."""
    findings = list(found)
    kinds = {finding.kind for finding in findings}
    if "complete" in kinds:
        return "finished"
    if "stopped" in kinds:
        return "stopped"
    if kinds & {"nobody", "stage-empty"}:
        return "standing still"
    return "degraded" if any(finding.severity > Severity.FINE for finding in findings) else "healthy"


def _by_severity(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: -finding.severity)


def tokens_per_second(seen: Seen) -> float:
    """Tokens per second of the whole run: what its first stage trains, 0 where a stage has nobody."""
    return 0.0 if seen.empty else sum(stats.tokens_per_second for stats in seen.serving(0))


def _empty_stages(seen: Seen) -> list[Finding]:
    if not seen.stats():
        sentence = f"no node of this run answers: nobody trains{_copies(seen, range(seen.stages))}"
        return [Finding(Severity.ALARM, "nobody", sentence)]
    return [_empty_stage(seen, stage) for stage in seen.empty]


def _empty_stage(seen: Seen, stage: int) -> Finding:
    seconds = max(seen.empty_for.get(stage, 0.0), _unserved(seen, stage))
    since = f" for {duration(seconds)}" if seconds else ""
    sentence = f"stage {stage}: nobody{since}, training stands still"
    if coming := sum(stats.state == "joining" for stats in seen.stats(stage)):
        sentence += f"; {coming} {'is' if coming == 1 else 'are'} joining it"
    sentence += _copies(seen, [stage])
    return Finding(Severity.ALARM, "stage-empty", sentence, stage)


def _copies(seen: Seen, stages: Sequence[int]) -> str:
    """The end of a sentence on stages that nobody serves: who keeps copies of them, how far, since when."""
    kept = [seen.copies[stage] for stage in stages if stage in seen.copies]
    if not kept:
        return ""
    steps, saved = [one.copy.step for one in kept], min(one.copy.saved for one in kept)
    keepers = sorted({one.peer for one in kept})
    who = f"{seen.called(keepers[0])} has" if len(keepers) == 1 else f"{len(keepers)} peers have"
    which = "a copy" if len(stages) == 1 else "copies"
    if len(stages) > 1:
        which += " of all stages" if len(kept) == len(stages) else f" of {len(kept)} of {len(stages)} stages"
    at = f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"
    return f"; {who} {which} (step {at}, {ago(min(MOST_AGO, seen.now - saved))})"


def _unserved(seen: Seen, stage: int) -> float:
    """Seconds for which the stage before has looked for somebody, or else since anybody's last step."""
    looking = max((stats.no_peer_seconds for stats in seen.stats(stage - 1)), default=0.0)
    ages = [stats.step_age for stats in seen.stats() if stats.step_age is not None]
    return looking or min(ages, default=0.0)


def _last_replicas(seen: Seen) -> list[Finding]:
    return [
        Finding(Severity.WARNING, "one-replica", f"stage {stage} has only one replica", stage)
        for stage in range(seen.stages)
        if len(seen.serving(stage)) == 1
    ]


def _slow_stage(seen: Seen) -> list[Finding]:
    """Find a stage that can do far less than all others, while they stand idle for part of the time."""
    if seen.stages < 2:
        return []
    able = [_capacity(seen.serving(stage)) for stage in range(seen.stages)]
    busy = [_mean(stats.recent_compute_fraction for stats in seen.serving(s)) for s in range(seen.stages)]
    known = [capacity for capacity in able if capacity is not None]
    if len(known) < seen.stages:
        return []
    slow = known.index(min(known))
    others = [stage for stage in range(seen.stages) if stage != slow]
    idle = [busy[stage] or 0.0 for stage in others]
    if any(known[stage] < SLOW * known[slow] for stage in others) or max(idle) > IDLE:
        return []
    times = min(known[stage] for stage in others) / known[slow]
    sentence = f"everyone waits for stage {slow}, which is slow: every other stage could do {times:.1f} times as much"
    return [Finding(Severity.WARNING, "slow-stage", sentence, slow)]


def _capacity(replicas: Sequence[NodeStats]) -> float | None:
    """Microbatches per second of a stage; replicas that do not know count as the mean of those that do."""
    told = [stats.seconds_per_microbatch or 0.0 for stats in replicas]
    known = [1 / seconds for seconds in told if seconds > LEAST_MICROBATCH]
    return fmean(known) * len(replicas) if known else None


def _spreads(seen: Seen) -> list[Finding]:
    found = []
    for stage in range(seen.stages):
        pairs = [
            (stats.spread, stats.expected_spread)
            for stats in seen.serving(stage)
            if stats.spread is not None and stats.expected_spread and stats.round >= ENOUGH_ROUNDS
        ]
        if not pairs:
            continue
        # one replica may have met few
        times = min(MOST_TIMES, median(spread / expected for spread, expected in pairs))
        if SPREAD_BAND[0] <= times <= SPREAD_BAND[1]:
            continue
        apart = f"{times:.2g} times as far apart as the theory says"
        sentence = f"stage {stage}: the spread is out of its band, replicas are {apart}"
        severity = Severity.ALARM if times > 1 else Severity.WARNING
        found.append(Finding(severity, "spread", sentence, stage))
    return found


def _versions(seen: Seen) -> list[Finding]:
    told = [stats.version for stats in seen.stats()]
    shared = [version for version, nodes in Counter(told).items() if nodes > 1]  # one alone may say anything
    newest = max([*shared, seen.version], key=order_of, default="")
    old = [version for version in told if order_of(version) < order_of(newest)]
    if not old:
        return []
    known = versions_told(old)
    which = f"version {known}" if known else "a version that does not tell its number"
    nodes = f"{len(old)} node{'s run' if len(old) > 1 else ' runs'}"
    sentence = f"{nodes} {which}, older than {versions_told([newest])}: ask for an upgrade"
    return [Finding(Severity.WARNING, "old-version", sentence)]


def _protocols(seen: Seen) -> list[Finding]:
    """Find members that speak another protocol, and replicas of versions that cannot average with each other."""
    found = []
    others = Counter(said.protocol for said in seen.foreign)
    for protocol, nodes in sorted(others.items())[:MOST_VERSIONS]:
        versions = versions_told(said.program for said in seen.foreign if said.protocol == protocol)
        which = f" (version {versions})" if versions else ""
        speak = "nodes speak" if nodes > 1 else "node speaks"
        later = protocol > PROTOCOL
        sentence = (
            f"{nodes} {speak} protocol {protocol}{which}, and this program protocol {PROTOCOL}: neither "
        )
        sentence += "works with the other; " + ("upgrade this one" if later else "ask for an upgrade")
        found.append(Finding(Severity.WARNING, "other-protocol", sentence))
    for stage in range(seen.stages):
        if apart := sum(stats.apart > 0 for stats in seen.serving(stage)):
            who = "replicas do" if apart > 1 else "replica does"
            sentence = f"stage {stage}: {apart} {who} not average with all others, being of versions apart: "
            sentence += "ask for an upgrade of the older ones"
            found.append(Finding(Severity.WARNING, "versions-apart", sentence, stage))
    return found


def versions_told(versions: Iterable[str]) -> str:
    """The versions told, in order, for people: what a stranger wrote is legible and short, and few are named."""
    known = sorted({version for version in versions if version}, key=order_of)
    names = [word(version) for version in known[:MOST_VERSIONS]]
    return ", ".join([*names, "…"] if len(known) > MOST_VERSIONS else names)


def _clocks(seen: Seen) -> list[Finding]:
    """Clocks that differ from most, the observer's among them."""
    told = [sighting.ahead for sighting in seen.sightings if sighting.ahead is not None]
    common = median([*told, 0.0])
    wrong = [ahead - common for ahead in told if abs(ahead - common) > CLOCK_APART]
    advice = "switch on time synchronisation"
    if abs(common) > CLOCK_APART:
        apart = f"{duration(abs(common))} {'behind' if common > 0 else 'ahead of'} the run's"
        sentence = f"the clock of this machine, which watches, is {apart}: {advice}"
        return [Finding(Severity.WARNING, "clock", sentence)]
    if not wrong or len(told) < LEAST_CLOCKS:
        return []
    worst = max(wrong, key=abs)
    apart = f"{duration(abs(worst))} {'ahead of' if worst > 0 else 'behind'} the others'"
    which = "the clock of 1 node is" if len(wrong) == 1 else f"the clocks of {len(wrong)} nodes are up to"
    return [Finding(Severity.WARNING, "clock", f"{which} {apart}: {advice} there")]


def _disks(seen: Seen) -> list[Finding]:
    full = sum(stats.cannot_save for stats in seen.stats())
    if not full:
        return []
    nodes = "1 node cannot write its" if full == 1 else f"{full} nodes cannot write their"
    sentence = f"{nodes} checkpoints: no disk, or none with room; what is trained there is lost when it ends"
    return [Finding(Severity.WARNING, "no-disk", sentence)]


def _silent(seen: Seen) -> list[Finding]:
    silent = sum(sighting.stats is None for sighting in seen.sightings)
    if not silent or not seen.stats():
        return []
    nodes = "1 node does not answer" if silent == 1 else f"{silent} nodes do not answer"
    return [Finding(Severity.FINE, "silent", f"{nodes}: just joined, or gone a moment ago")]


def _trains(seen: Seen) -> Finding:
    rate = tokens_per_second(seen)
    if rate:
        sentence = f"training at {rate:,.0f} tokens/s; too early to say whether it learns"
        return Finding(Severity.FINE, "training", sentence)
    return Finding(Severity.FINE, "training", "every stage has somebody; no speed is known yet")


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
