"""The view for people while a swarm trains: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bootstrap.display import plain_table, say, write_whole
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Seen
from bootstrap.inspect.verdict import tokens_per_second
from node.links.links import median_round_trip
from node.machine.devices import GB
from node.watch.words import LONGEST_NAME, word
from protocol.ground import PeerId
from protocol.messages.peers import NodeStats


@dataclass(frozen=True)
class Picture:
    """The swarm at one moment."""

    title: str
    seconds: float
    sightings: Sequence[Sighting]
    stages: int = 0  # 0 when unknown
    expected: int = 0  # nodes that were started; 0 when unknown
    names: Mapping[PeerId, str] = field(default_factory=dict)  # short ones, of known peers
    validation: Sequence[tuple[int, float, float]] = ()  # (tokens, seconds, nats)
    is_held_out: bool = True  # the text that they are of
    bigram: float | None = None
    sampled_spread: float | None = None

    @property
    def stats(self) -> list[NodeStats]:
        return [sighting.stats for sighting in self.sightings if sighting.stats is not None]

    def spread(self) -> float | None:
        """Spread on a sample of the weights; where none was taken, what the nodes expect of their last meetings."""
        if self.sampled_spread is not None:
            return self.sampled_spread
        return _mean([stats.spread for stats in self.stats], power=2)


def _mean(values: Sequence[float | None], power: int = 1) -> float | None:
    """The power mean of the values that are known; None when none is."""
    known = [value**power for value in values if value is not None]
    return (sum(known) / len(known)) ** (1 / power) if known else None


def tokens_trained(sightings: Sequence[Sighting]) -> int:
    """Tokens that have gone through the whole pipeline: those that stage 0 counts."""
    return sum(s.stats.tokens for s in sightings if s.stats is not None and s.stats.stage == 0)


PICTURE_WIDTH = 110
NARROW = 100  # columns: in less, those of `DETAILS` have no room
WIDE = 140  # with room for the devices' columns, and the width of what is no terminal
MOST_ROWS = 1_000
LEAST_WIDTHS = {"node": 4, "stage": 5, "state": 7, "step": 4}  # cut last on a narrow terminal
PLAIN_LINE_SECONDS = 3.0
COLUMNS = (
    "node", "stage", "state", "step", "round", "loss", "tok/s", "busy", "s/batch", "partner", "pairs", "resent",
)  # fmt: skip
DEVICE_COLUMNS = ("device", "memory", "of peak")


DETAILS = {"s/batch", "partner", "pairs", "resent"}


def render(picture: Picture, width: int = PICTURE_WIDTH) -> Group:
    """The table of nodes in that many columns, and below it the headline."""
    return Group(node_table(picture, width), Text(), Text(headline(picture)))


def node_table(picture: Picture, width: int = PICTURE_WIDTH) -> Table:
    """The table of nodes; what they compute on is shown where there is room for it."""
    columns = COLUMNS if width < WIDE else (*COLUMNS, *DEVICE_COLUMNS)
    shown = [place for place, name in enumerate(columns) if width >= NARROW or name not in DETAILS]
    headings = [columns[place] for place in shown]
    table = plain_table(picture.title, headings, left=("node", "state", "partner", "device"), is_dense=True)
    for column in table.columns:
        column.min_width = LEAST_WIDTHS.get(str(column.header))
    names = {s.member.peer: name_of(s, picture.names) for s in picture.sightings}
    # those that answer first: anybody can claim to be there
    listed = sorted(
        picture.sightings, key=lambda s: (s.stats is None, s.member.announcement.stage, name_of(s, names))
    )
    for sighting in sorted(
        listed[:MOST_ROWS], key=lambda s: (s.member.announcement.stage, name_of(s, names))
    ):
        row = [*_row(sighting, names), *(_device(sighting.stats) if len(columns) > len(COLUMNS) else ())]
        table.add_row(*(Text(row[place]) for place in shown))
    if len(listed) > MOST_ROWS:
        silent = sum(sighting.stats is None for sighting in listed[MOST_ROWS:])
        table.caption = (
            f"and {len(listed) - MOST_ROWS:,} more, {silent:,} of which do not answer (--json has all)"
        )
    return table


def headline(picture: Picture) -> str:
    """One line: time, peers alive, tokens, rate, losses, the median round trip and spread."""
    nodes = picture.stats
    peers = f"{len(nodes)}/{picture.expected}" if picture.expected else str(len(nodes))
    rate = tokens_per_second(Seen(picture.stages, picture.sightings))
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
        parts.append(f"{'held-out' if picture.is_held_out else 'same text'} {picture.validation[-1][2]:.3f}")
    if picture.bigram is not None:
        parts.append(f"bigram {picture.bigram:.3f}")
    if round_trip is not None:
        parts.append(f"round trip {1000 * round_trip:.0f} ms")
    parts.append(f"spread {_scientific(picture.spread())} (theory {_scientific(theory)})")
    return "  ".join(parts)


def display(console: Console) -> tuple[Callable[[Picture], None], Callable[[], None]]:
    """Return (draw, close): the one draws one picture after another, the other ends it.

    A live table in a terminal; elsewhere a plain line now and then.
    """
    if console.is_terminal:
        live = Live(console=console, auto_refresh=False, transient=False)
        live.start()
        return lambda picture: live.update(render(picture, console.width), refresh=True), live.stop
    shown = -PLAIN_LINE_SECONDS

    def line(picture: Picture) -> None:
        nonlocal shown
        if picture.seconds - shown >= PLAIN_LINE_SECONDS:
            shown = picture.seconds
            say(console, headline(picture))

    return line, lambda: None


def save_svg(path: Path, picture: Picture) -> None:
    """The table as a terminal shows it, as an SVG file. Raises `StateError` when it cannot be written."""
    console = Console(markup=False, record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(render(picture, PICTURE_WIDTH))
    write_whole(path, console.export_svg(title="noloco swarm"), "Name another --picture.")


def name_of(sighting: Sighting, names: Mapping[PeerId, str]) -> str:
    """The name that this watcher knows it by, or its volunteer's; else the end of its key."""
    peer = sighting.member.peer
    return names.get(peer) or word(sighting.member.announcement.name, LONGEST_NAME) or peer[-8:]


def _row(sighting: Sighting, names: Mapping[PeerId, str]) -> list[str]:
    record, stats = sighting.member.announcement, sighting.stats
    name = name_of(sighting, names)
    if stats is None:
        known = [name, str(record.stage), f"{record.state}?", str(record.step), str(record.round)]
        return known + [""] * (len(COLUMNS) - len(known))
    partner = names.get(PeerId(stats.partner), stats.partner[-8:]) if stats.partner else "alone"
    progress = [name, str(stats.stage), word(stats.state), str(stats.step), str(stats.round)]
    speed = [f"{stats.tokens_per_second:,.0f}", percent(stats.recent_compute_fraction), _lag(stats)]
    pairs = [partner if stats.round else "", str(stats.pair_averagings), str(stats.resends)]
    return [*progress, _number(stats.loss, 3), *speed, *pairs]


def _device(stats: NodeStats | None) -> list[str]:
    """The cells on a node's device, as it describes it; anybody can say that."""
    if stats is None or not stats.device:
        return [""] * len(DEVICE_COLUMNS)
    name = word(stats.device.removeprefix("NVIDIA "))
    memory = f"{stats.memory / GB:.1f}/{stats.memory_of_device / GB:.0f} GB"
    unknown = "-" if stats.device == "cpu" else "unknown device"
    return [name, memory, unknown if stats.share_of_peak is None else percent(stats.share_of_peak)]


def _lag(stats: NodeStats) -> str:
    """Seconds of computing for a microbatch, and how many waited for it when the last step ended."""
    if stats.seconds_per_microbatch is None:
        return "-"
    waiting = f" +{stats.queue}" if stats.queue else ""
    return f"{stats.seconds_per_microbatch:.2g}{waiting}"


def percent(fraction: float | None) -> str:
    """The fraction in percent; a dash where a node of an earlier version gives no number."""
    return "-" if fraction is None else f"{fraction:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
