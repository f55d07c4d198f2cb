"""The report as one page that needs nothing else: the numbers, the checks, and how it went minute by minute."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from bootstrap.display import write_whole
from bootstrap.lab.simulated_swarm.swarm_checks import SwarmCheck
from bootstrap.lab.simulated_swarm.swarm_measures import BIN, Moment
from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome
from bootstrap.lab.simulated_swarm.swarm_report import rows_of
from bootstrap.lab.simulated_swarm.swarm_world import SwarmWorld

WIDTH, HEIGHT = 720, 140
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 760px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .15rem 1rem .15rem 0; text-align: left; vertical-align: top; }
.broken { color: #c22; font-weight: 600; } svg { width: 100%; height: auto; } path { fill: none; stroke-width: 1.5; }
line { stroke: currentColor; opacity: .25; } text { fill: currentColor; font-size: 11px; }
"""
Curve = tuple[str, str, Callable[[Moment], float | None]]  # name, colour, value
CURVES: list[tuple[str, list[Curve]]] = [
    (
        "Throughput by the ideal of the peers present",
        [("", "#2a7", lambda m: m.done / m.ideal if m.ideal else None)],
    ),
    ("Peers: present, serving", [("present", "#47c", lambda m: m.peers), ("serving", "#2a7", lambda m: m.serving)]),
    ("Rounds alone", [("", "#c62", lambda m: m.alone / m.rounds if m.rounds else None)]),
    ("Spread by the theory's", [("", "#82a", lambda m: m.spread)]),
]  # fmt: skip


def write_page(file: Path, world: SwarmWorld, outcome: SwarmOutcome, checks: Sequence[SwarmCheck]) -> None:
    """Write the page. Raises `StateError` when the file cannot be written."""
    moments = [(place * BIN / 60, m) for place, m in sorted(world.measures.moments.items()) if m.peers]
    title = html.escape(f"Simulated swarm {outcome.scenario}")
    rows = "".join(f"<tr><th>{html.escape(n)}<td>{html.escape(v)}" for n, v in rows_of(outcome))
    told = "".join(
        f"<tr class={'holds' if check.holds else 'broken'}><td>{html.escape(check.sentence)}"
        f"<td>{'holds' if check.holds else 'broken'}"
        for check in checks
    )
    charts = "".join(f"<h2>{html.escape(name)}</h2>{_chart(moments, curves)}" for name, curves in CURVES)
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"<p>{outcome.peers:,} peers, {outcome.minutes:g} virtual minutes, seed {outcome.seed}.</p>"
        f"<table>{rows}</table><h2>Checks</h2><table>{told}</table>{charts}</html>\n"
    )
    write_whole(file, page, "Choose another file for --page.")


def _chart(moments: Sequence[tuple[float, Moment]], curves: Sequence[Curve]) -> str:
    """Lines over the minutes, from nothing to the largest value."""
    lines = [
        (name, colour, [(minute, v) for minute, m in moments if (v := value(m)) is not None])
        for name, colour, value in curves
    ]
    highest = max((v for _, _, points in lines for _, v in points), default=0.0) or 1.0
    last = max((minute for minute, _ in moments), default=0.0) or 1.0

    def place(minute: float, value: float) -> str:
        return f"{40 + (WIDTH - 50) * minute / last:.1f} {HEIGHT - 20 - (HEIGHT - 30) * value / highest:.1f}"

    drawn = "".join(
        f"<path stroke='{colour}' d='M{' L'.join(place(*point) for point in points)}'><title>{name}</title></path>"
        for name, colour, points in lines
        if points
    )
    floor = HEIGHT - 20
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img><line x1=40 x2={WIDTH - 10} y1={floor} y2={floor} />"
        f"<text x=0 y=14>{highest:.3g}</text><text x=0 y={floor}>0</text>"
        f"<text x={WIDTH - 60} y={HEIGHT - 4}>{last:.0f} min</text>{drawn}</svg>"
    )
