"""`noloco status`: what a run's numbers mean, how far it is, its stages and nodes; once, again and again, as JSON."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bootstrap.display import plain_table
from bootstrap.inspect.kept_copies import copies_of
from bootstrap.inspect.observer import Observer, Sighting, sampled_spreads, spread_of_all, visit
from bootstrap.inspect.remembering import Memory
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.table import (
    MOST_ROWS,
    PICTURE_WIDTH,
    Picture,
    headline,
    name_of,
    node_table,
    percent,
    save_svg,
)
from bootstrap.inspect.verdict import in_a_word, tokens_per_second, verdict, versions_told
from node.watch.words import duration
from protocol.errors import NolocoError, legible
from protocol.ground import PeerId
from protocol.records.addresses import is_loopback
from protocol.run.manifest import Manifest
from protocol.version import own_version
from protocol.windows import amount

WATCH_SECONDS = 5.0
MOST_PASSING = 8  # nodes that are named with what they have passed on
MOST_GLYPHS = 12  # of a stage's members
SIGNS = {
    Severity.ALARM: ("!!", "bold red"),
    Severity.WARNING: ("! ", "yellow"),
    Severity.FINE: ("  ", "green"),
}


@dataclass(frozen=True)
class HowFar:
    """A run's progress: inner steps of its median first-stage replica; None where it stands still or is over."""

    step: int
    total_steps: int
    seconds_left: float | None

    def described(self) -> str:
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        return f"step {self.step:,} of {self.total_steps:,}{left}"


def progress_of(seen: Seen, total_steps: int, tokens_per_step: int) -> HowFar:
    """The progress of a run; `tokens_per_step` are those of one replica, and 0 steps are an unknown number."""
    replicas = seen.stats(0)
    step = int(median(stats.step for stats in replicas)) if replicas else 0
    rates = [stats.tokens_per_second for stats in seen.serving(0) if stats.tokens_per_second]
    is_going = total_steps and rates and not seen.empty and not seen.is_over
    left = max(0, total_steps - step) * tokens_per_step / median(rates) if is_going else None
    return HowFar(step, total_steps, left)


@dataclass(frozen=True)
class RunStatus:
    """A run as an observer has just seen it."""

    run_id: str
    manifest: Manifest
    seen: Seen
    spreads: Mapping[int, float] = field(default_factory=dict)  # by stage, on a sample of the weights
    dialled: Mapping[PeerId, str] = field(
        default_factory=dict
    )  # addresses at which peers answered the observer

    @property
    def findings(self) -> list[Finding]:
        return verdict(self.seen)

    @property
    def progress(self) -> HowFar:
        inner, tokens = self.manifest.inner, self.manifest.tokens_per_microbatch
        return progress_of(self.seen, inner.total_steps, inner.microbatches * tokens)

    def picture(self) -> Picture:
        uptime = max((stats.uptime for stats in self.seen.stats()), default=0.0)
        spread = spread_of_all(self.manifest, self.spreads)
        return Picture(
            "nodes", uptime, self.seen.sightings, stages=self.manifest.stages, sampled_spread=spread
        )


def shown(status: RunStatus, width: int) -> Group:
    """A word, the verdict, who is at each stage, then a line for each stage and one for each node."""
    picture, manifest = status.picture(), status.manifest
    versions = versions_told(stats.version for stats in status.seen.stats())
    of = f"  version {versions}" if versions else ""
    findings = status.findings
    said = [
        Text(f"{in_a_word(findings)}  run '{manifest.name}'  {status.run_id}{of}", style="bold"),
        Text(status.progress.described()),
    ]
    for finding in findings:
        sign, style = SIGNS[finding.severity]
        said.append(Text(f"{sign} {finding.sentence}.", style=style))
    stages = stage_table(status.seen, status.spreads)
    return Group(
        *said,
        Text(),
        glyphs(status.seen),
        Text(),
        stages,
        Text(),
        node_table(picture, width),
        *passed_on(status.seen.sightings),
        Text(),
        Text(headline(picture)),
    )


def passed_on(sightings: Sequence[Sighting]) -> list[Text]:
    """A line on the nodes that pass streams on between others, with what each of them has; none without any."""
    passing = {
        name_of(s, {}): s.stats.passed_on for s in sightings if s.stats is not None and s.stats.passed_on
    }
    most = sorted(passing, key=lambda name: -passing[name])[:MOST_PASSING]
    told = ", ".join(f"{name} {amount(passing[name])}" for name in most)
    more = f" and {len(passing) - MOST_PASSING:,} more" if len(passing) > MOST_PASSING else ""
    return [Text(), Text(f"passed on for others: {told}{more}")] if passing else []


def glyphs(seen: Seen) -> Text:
    """Each stage's members in a row: ● serves, ◐ joins, ○ does not answer; ✗ is where none serves."""
    text = Text("   ")
    for stage in range(seen.stages):
        here = [s.stats for s in seen.sightings if s.member.announcement.stage == stage]
        serving = sum(stats is not None and stats.state in ("serving", "finished") for stats in here)
        silent = sum(stats is None for stats in here)
        row = "●" * serving + "◐" * (len(here) - serving - silent) + "○" * silent
        row = row if len(row) <= MOST_GLYPHS else f"{row[:MOST_GLYPHS]}+{len(row) - MOST_GLYPHS:,}"
        style = "" if serving else SIGNS[Severity.ALARM][1]
        text.append(f"{stage}:{row if serving else '✗' + row}", style=style).append("   ")
    text.rstrip()
    return text


def stage_table(seen: Seen, spreads: Mapping[int, float]) -> Table:
    headings = ("stage", "replicas", "joining", "step", "round", "loss", "tok/s", "busy", "spread", "theory")
    table = plain_table("stages", headings, is_dense=True)
    for stage in range(seen.stages):
        table.add_row(str(stage), *_stage_row(seen, stage, spreads.get(stage)))
    return table


def _stage_row(seen: Seen, stage: int, spread: float | None) -> list[str]:
    everybody = seen.stats(stage)
    replicas = [stats for stats in everybody if stats.state in ("serving", "finished")]
    counts = [str(len(replicas)), str(len(everybody) - len(replicas))]
    if not replicas:
        return [*counts, "-", "-", "-", "stands still", "-", "-", "-"]
    rate = 0.0 if seen.empty else sum(stats.tokens_per_second for stats in replicas)
    return [
        *counts,
        _span([stats.step for stats in replicas]),
        _span([stats.round for stats in replicas]),
        _number([stats.loss for stats in replicas], ".3f"),
        f"{rate:,.0f}" if rate or not seen.empty else "stands still",
        percent(_mean([stats.recent_compute_fraction for stats in replicas])),
        _number([stats.spread for stats in replicas] if spread is None else [spread], ".2g"),
        _number([stats.expected_spread for stats in replicas], ".2g"),
    ]


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _number(values: Sequence[float | None], form: str) -> str:
    mean = _mean(values)
    return "-" if mean is None else format(mean, form)


def as_json(status: RunStatus) -> dict[str, object]:
    """Everything that is shown, for programs."""
    progress = status.progress
    nodes = [
        {
            "peer": sighting.member.peer,
            "stage": sighting.member.announcement.stage,
            "addresses": sighting.member.announcement.addresses,
            "through": sighting.member.announcement.through,
            "join": where_to_join(status, sighting),
            "answers": sighting.stats is not None,
            **({} if sighting.stats is None else sighting.stats.model_dump()),
        }
        for sighting in status.seen.sightings
    ]
    return {
        "run": {"name": status.manifest.name, "id": status.run_id, "stages": status.manifest.stages},
        "version": status.seen.version,
        "state": in_a_word(status.findings),
        "verdict": [
            {
                "severity": f.severity.name.lower(),
                "kind": f.kind,
                "stage": f.stage,
                "time": f.time,
                "sentence": f.sentence,
            }
            for f in status.findings
        ],
        "step": progress.step,
        "total_steps": progress.total_steps,
        "seconds_left": progress.seconds_left,
        "tokens_per_second": tokens_per_second(status.seen),
        "spread_by_stage": {str(stage): spread for stage, spread in status.spreads.items()},
        "nodes": nodes,
    }


def where_to_join(status: RunStatus, sighting: Sighting) -> str:
    """An address to join the run at: the member's, or one of a peer that passes streams on to it; "" for none."""
    said = sighting.member.announcement
    if not said.through:
        return next(iter(said.addresses), "")
    known = {
        other.member.peer: other.member.announcement.addresses[0]
        for other in status.seen.sightings
        if other.member.announcement.addresses and not other.member.announcement.through
    }
    found = (known.get(PeerId(way)) or status.dialled.get(PeerId(way)) for way in said.through)
    return next(filter(None, found), "")


def _through(status: RunStatus, sighting: Sighting) -> str:
    """Say whose address is shown in place of that of a member that nobody can dial."""
    if not sighting.member.announcement.through:
        return ""
    way = where_to_join(status, sighting).rpartition("/p2p/")[2]
    if way == sighting.member.peer:  # it has found nobody to pass streams on, and this observer is near it
        return ""
    names = {other.member.peer: name_of(other, {}) for other in status.seen.sightings}
    return f"  (of {names.get(PeerId(way), f'…{way[-8:]}')}, which passes streams on to it)"


class Watching:
    """One observer's looks. Mutable state: what it remembers of earlier ones."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._memory = Memory(observer.manifest.stages, own_version(), observer.manifest.inner.total_steps)

    async def look(self, *, is_first: bool = False) -> RunStatus:
        observer = self._observer
        sightings = await (observer.survey() if is_first else observer.look())
        seen = self._memory.look(sightings, observer.transport.now())
        seen = replace(seen, foreign=observer.view.of_other_protocols(seen.now))
        if seen.empty:
            seen = replace(seen, copies=await copies_of(observer, seen.empty))
        spreads = await sampled_spreads(observer, random.SystemRandom())
        return RunStatus(observer.signed.run_id, observer.manifest, seen, spreads, await self._dialled())

    async def _dialled(self) -> dict[PeerId, str]:
        """The addresses at which the peers that are connected were dialled: an observer itself does not listen."""
        try:
            places = await self._observer.transport.remotes()
        except NolocoError:
            return {}
        known = ((peer, place) for peer, found in places.items() for place in found[:1])
        return {peer: f"{place}/p2p/{peer}" for peer, place in known if not is_loopback(place)}


async def show_status(
    join: Sequence[str], token: str, file: Path | None, *, watch: bool, is_json: bool
) -> None:
    """Print a running swarm's verdict, stages, nodes and addresses; with `watch` again and again until Ctrl-C.

    With `file`, also save the table of nodes as a picture. Raises `JoinError` when nobody answers, `StateError` when
    the picture cannot be written.
    """
    async with visit(join, token) as observer:
        watching = Watching(observer)
        status = await watching.look(is_first=True)
        if file is not None:
            save_svg(file, status.picture())
        if is_json or not watch:
            await _print_all(watching, status, watch=watch, is_json=is_json)
            return
        console = Console(markup=False)
        with Live(shown(status, console.width), console=console, auto_refresh=False) as live:
            while True:
                live.update(shown(status, console.width), refresh=True)
                await asyncio.sleep(WATCH_SECONDS)
                status = await watching.look()


async def _print_all(watching: Watching, status: RunStatus, *, watch: bool, is_json: bool) -> None:
    """Print the status, and with `watch` again after each look; as JSON, one line for each."""
    while True:
        if is_json:
            print(json.dumps(as_json(status)), flush=True)
        else:
            print_status(status)
        if not watch:
            return
        await asyncio.sleep(WATCH_SECONDS)
        status = await watching.look()


def print_status(status: RunStatus) -> None:
    """Print what is `shown`, and for each node an address to join at."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, PICTURE_WIDTH)
    console.print(shown(status, console.width))
    for sighting in status.seen.sightings[:MOST_ROWS]:
        if address := where_to_join(status, sighting):
            print(f"{name_of(sighting, {})}  {legible(address)}{_through(status, sighting)}")
