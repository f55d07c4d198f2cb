"""What a person watches while a swarm trains: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bootstrap.display import plain_table, writing
from bootstrap.inspect.observer import Sighting, visit
from node.links.links import median_round_trip
from protocol.messages.peers import NodeStats
from protocol.transport.base import PeerId


@dataclass(frozen=True)
class Picture:
    """The swarm at one moment."""

    title: str
    seconds: float
    sightings: Sequence[Sighting]
    expected: int = 0  # nodes that were started; 0 when unknown
    names: Mapping[PeerId, str] = field(default_factory=dict)  # short ones, of known peers
    validation: Sequence[tuple[int, float, float]] = ()  # (tokens, seconds, nats)
    bigram: float | None = None

    @property
    def stats(self) -> list[NodeStats]:
        return [sighting.stats for sighting in self.sightings if sighting.stats is not None]

    def spread(self) -> float | None:
        """The nodes' own estimates, as a root mean square; None while there are none."""
        return _mean([stats.spread for stats in self.stats], power=2)


def _mean(values: Sequence[float | None], power: int = 1) -> float | None:
    """The power mean of the values that are known; None when none is."""
    known = [value**power for value in values if value is not None]
    return (sum(known) / len(known)) ** (1 / power) if known else None


def tokens_trained(sightings: Sequence[Sighting]) -> int:
    """Tokens that have gone through the whole pipeline: those that stage 0 counts."""
    return sum(s.stats.tokens for s in sightings if s.stats is not None and s.stats.stage == 0)


PICTURE_WIDTH = 110
LEAST_WIDTHS = {"node": 4, "stage": 5, "state": 7, "step": 4}  # cut last on a narrow terminal
PLAIN_LINE_SECONDS = 4.0
COLUMNS = (
    "node", "stage", "state", "step", "round", "loss", "tok/s", "busy", "s/batch", "partner", "pairs", "resent",
)  # fmt: skip


def render(picture: Picture) -> Group:
    """The table of nodes, and below it the headline."""
    table = plain_table(picture.title, COLUMNS, left=("node", "state", "partner"), is_dense=True)
    for column in table.columns:
        column.min_width = LEAST_WIDTHS.get(str(column.header))
    names = picture.names
    for sighting in sorted(picture.sightings, key=lambda s: (s.member.announcement.stage, name_of(s, names))):
        table.add_row(*_row(sighting, names))
    return Group(table, Text(), Text(headline(picture)))


def headline(picture: Picture) -> str:
    """One line: time, peers alive, tokens, rate, losses, the median round trip and spread."""
    nodes = picture.stats
    peers = f"{len(nodes)}/{picture.expected}" if picture.expected else str(len(nodes))
    rate = sum(stats.tokens_per_second for stats in nodes if stats.stage == 0)
    theory = _mean([stats.expected_spread for stats in nodes], power=2)
    round_trip = median_round_trip([report for stats in nodes for report in stats.links])
    parts = [
        f"{picture.seconds:4.0f} s",
        f"{peers} alive",
        f"{tokens_trained(picture.sightings):,} tokens",
        f"{rate:,.0f}/s",
        f"loss {_number(_mean([stats.loss for stats in nodes]), 3)}",
    ]
    if picture.validation:
        parts.append(f"held-out {picture.validation[-1][2]:.3f}")
    if picture.bigram is not None:
        parts.append(f"bigram {picture.bigram:.3f}")
    if round_trip is not None:
        parts.append(f"round trip {1000 * round_trip:.0f} ms")
    parts.append(f"spread {_number(picture.spread(), 4)} (theory {_number(theory, 4)})")
    return "  ".join(parts)


def show(console: Console, picture: Picture) -> None:
    """Print the whole picture once; output that is not a terminal gets all columns."""
    width = None if console.is_terminal else max(console.width, PICTURE_WIDTH)
    console.print(render(picture), width=width, crop=console.is_terminal)


def display(console: Console) -> tuple[Callable[[Picture], None], Callable[[], None]]:
    """(draw, close): draws one picture after another, and is closed at the end.

    A live table in a terminal; elsewhere a plain line now and then.
    """
    if console.is_terminal:
        live = Live(console=console, auto_refresh=False, transient=False)
        live.start()
        return lambda picture: live.update(render(picture), refresh=True), live.stop
    shown = -PLAIN_LINE_SECONDS

    def line(picture: Picture) -> None:
        nonlocal shown
        if picture.seconds - shown >= PLAIN_LINE_SECONDS:
            shown = picture.seconds
            console.print(headline(picture), soft_wrap=True)

    return line, lambda: None


def save_svg(path: Path, picture: Picture) -> None:
    """The table as a terminal shows it, as an SVG file. Raises `StateError` when it cannot be written."""
    console = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
    show(console, picture)
    with writing(path, "Name another --picture."):
        path.write_text(console.export_svg(title="noloco swarm"), encoding="utf-8")


def name_of(sighting: Sighting, names: Mapping[PeerId, str]) -> str:
    return names.get(sighting.member.peer, sighting.member.peer[-8:])


def _row(sighting: Sighting, names: Mapping[PeerId, str]) -> list[str]:
    record, stats = sighting.member.announcement, sighting.stats
    name = name_of(sighting, names)
    if stats is None:
        known = [name, str(record.stage), f"{record.state}?", str(record.step), str(record.round)]
        return known + [""] * (len(COLUMNS) - len(known))
    partner = names.get(PeerId(stats.partner), stats.partner[-8:]) if stats.partner else "alone"
    progress = [name, str(stats.stage), stats.state, str(stats.step), str(stats.round)]
    speed = [f"{stats.tokens_per_second:,.0f}", percent(stats.recent_compute_fraction), _lag(stats)]
    pairs = [partner if stats.round else "", str(stats.pair_averagings), str(stats.resends)]
    return [*progress, _number(stats.loss, 3), *speed, *pairs]


def _lag(stats: NodeStats) -> str:
    """Seconds of computing for a microbatch, and how many waited for it when the last step ended."""
    if stats.seconds_per_microbatch is None:
        return "-"
    waiting = f" +{stats.queue}" if stats.queue else ""
    return f"{stats.seconds_per_microbatch:.2g}{waiting}"


def percent(fraction: float | None) -> str:
    """A dash where a node of an earlier version gives no number."""
    return "-" if fraction is None else f"{fraction:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


async def show_status(join: Sequence[str], file: Path | None) -> None:
    """Print the table of a running swarm and the nodes' addresses; with `file`, also save it as a picture.

    Raises `JoinError` when nobody answers, `StateError` when the picture cannot be written.
    """
    async with visit(join) as observer:
        sightings = await observer.survey()
        manifest = observer.manifest
        title = f"run '{manifest.name}'  {observer.signed.run_id}  {manifest.stages} stages"
        uptime = max((s.stats.uptime for s in sightings if s.stats is not None), default=0.0)
        picture = Picture(title, uptime, sightings)
        show(Console(), picture)
        for sighting in sightings:
            for address in sighting.member.announcement.addresses[:1]:  # where others dial it
                print(f"{name_of(sighting, {})}  {address}")
        if file is not None:
            save_svg(file, picture)
