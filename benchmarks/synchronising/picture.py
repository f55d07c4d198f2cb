"""The picture of the study of latency: times of one synchronisation, and time blocked, over N."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bootstrap.display import figure

from .tables import LatencyPoint

SCHEMES = (
    ("tree", "tree all-reduce", "C3"),
    ("pair_via_one", "pair, through one of the two", "C1"),
    ("pair_at_once", "pair, both at once", "C0"),
    ("slowest_pair", "slowest of all pairs", "C7"),
)
WAYS = (
    ("all_reduce", "all-reduce", "C3"),
    ("pair_every_round", "pair, round after round", "C1"),
    ("pair_training_on", "pair, training on", "C0"),
)
# one for each σ, then again from the first
STYLES = (("-", "solid"), ("--", "dashed"), (":", "dotted"), ("-.", "dash-dotted"))


def plot_latency(points: Sequence[LatencyPoint], file: Path) -> None:
    """Draw both panels into `file` (.svg, .png, .pdf). Raises `UserError` when it cannot be written."""
    sigmas = sorted({point.sigma for point in points})
    with figure(file, panels=2) as (times, shares):
        for number, sigma in enumerate(sigmas):
            line = [point for point in points if point.sigma == sigma]
            for name, label, colour in SCHEMES:
                _draw(times, line, [getattr(p.simulated, name) for p in line], label, number, colour)
            for name, label, colour in WAYS:
                _draw(shares, line, [100 * getattr(p.blocked, name) for p in line], label, number, colour)
        times.set(yscale="log", ylabel="median one-way messages", title="one synchronisation")
        shares.set(ylabel="% of the time", title="blocked", ylim=(0, None))
        styles = ", ".join(f"{STYLES[n % len(STYLES)][1]} σ = {sigma:g}" for n, sigma in enumerate(sigmas))
        for axis in (times, shares):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("replicas N")
            axis.legend(frameon=False, fontsize=7, title=styles, title_fontsize=7, alignment="left")


def _draw(
    axis: Any, line: Sequence[LatencyPoint], values: Sequence[float], label: str, number: int, colour: str
) -> None:
    """The `number`-th σ, from 0, of one curve; only the first one is named in the legend."""
    style, _ = STYLES[number % len(STYLES)]
    sizes = [point.replicas for point in line]
    axis.plot(sizes, values, style, color=colour, label=label if number == 0 else None, linewidth=1.2)
