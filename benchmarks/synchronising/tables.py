"""What the study of latency shows: two tables, and where the factor between them comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from .idle import Blocked
from .sync_times import SyncTimes, expected_sync, levels


@dataclass(frozen=True)
class LatencyPoint:
    """One number of replicas under one variation σ of the latencies."""

    replicas: int
    sigma: float
    simulated: SyncTimes
    expected: SyncTimes
    blocked: Blocked

    @property
    def ratios(self) -> dict[str, float]:
        """How many times longer all replicas take together than one pair does."""
        times = self.simulated
        return {
            "tree_to_pair_via_one": times.tree / times.pair_via_one,
            "tree_to_pair_at_once": times.tree / times.pair_at_once,
            "ring_to_pair_at_once": times.ring / times.pair_at_once,
            "tree_to_slowest_pair": times.tree / times.slowest_pair,
        }

    def as_json(self) -> dict[str, Any]:
        expected = {
            name: None if math.isnan(value) else value for name, value in asdict(self.expected).items()
        }
        del expected["error"]
        facts = {
            "replicas": self.replicas,
            "sigma": self.sigma,
            **asdict(self.simulated),
            "expected": expected,
            "ratios": self.ratios,
            "blocked": asdict(self.blocked),
        }
        return {name: _rounded(value) for name, value in facts.items()}


@dataclass(frozen=True)
class Conditions:
    """What all points share. Times in seconds; `transfer` in median messages."""

    latency: float
    transfer: float
    inner_steps: int
    step: float
    variation: float
    samples: int


def sync_table(points: Sequence[LatencyPoint], conditions: Conditions) -> Table:
    """Times until the last replica has finished, and their ratios."""
    unit = f"unit: the median one-way message, {conditions.latency * 1000:g} ms"
    if conditions.transfer:
        unit += f"; a state: {_short(conditions.transfer)}"
    table = _table(f"Synchronising once ({unit})")
    for heading in ("N", "σ", "tree", "ring", "pair,\nvia one", "pair,\nat once", "slowest\npair"):
        table.add_column(heading, justify="right")
    for heading in ("tree/\nvia one", "tree/\nat once", "ring/\nat once"):
        table.add_column(heading, justify="right", style="bold")
    for point in points:
        times, ratios = point.simulated, point.ratios
        table.add_row(
            str(point.replicas),
            f"{point.sigma:g}",
            *(_short(time) for time in (times.tree, times.ring, times.pair_via_one)),
            *(_short(time) for time in (times.pair_at_once, times.slowest_pair)),
            *(_short(ratio) for ratio in list(ratios.values())[:3]),
        )
    return table


def idle_table(points: Sequence[LatencyPoint], conditions: Conditions) -> Table:
    """The fraction of time that replicas are blocked."""
    table = _table(
        f"Time blocked (rounds of {conditions.inner_steps} inner steps, {conditions.step:g} s ± "
        f"{conditions.variation:.0%} each)"
    )
    headings = (
        "N",
        "σ",
        "all-\nreduce",
        "pair,\none round",
        "pair, round\nafter round",
        "pair,\ntraining on",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("all-reduce/\nround after round", justify="right", style="bold")
    for point in points:
        shares = point.blocked
        table.add_row(
            str(point.replicas),
            f"{point.sigma:g}",
            *(f"{share:.2%}" for share in asdict(shares).values()),
            _short(shares.all_reduce / shares.pair_every_round),
        )
    return table


def explanation(points: Sequence[LatencyPoint], conditions: Conditions) -> list[str]:
    """Where the factor of about ten comes from, in the numbers of the largest swarm of `points`."""
    last = max(points, key=lambda point: (point.replicas, point.sigma))
    n, depth = last.replicas, last.replicas.bit_length() - 1
    lines = [
        f"Where the factor comes from, N = {n}:",
        f"- A tree passes messages up and down {depth} levels: {depth} × 2 = {2 * depth} in a row. A pair that "
        f"exchanges through one of the two, as in the paper's public code, needs 2: {2 * depth} / 2 = {depth}. "
        "So the factor is log2(N): 10 at 1,000 replicas, as the paper says.",
        f"- A pair that sends both ways at once needs one message time: {2 * depth} / 1 = {2 * depth}.",
    ]
    if last.sigma > 0:
        alone = expected_sync([n], last.sigma)[n]  # the latency of the messages, without their bytes
        lines += [
            "- Variation widens it, since a tree waits for the slower of two on each level: at σ = "
            f"{last.sigma:g} it is {_short(alone.tree / alone.pair_via_one)} and "
            f"{_short(alone.tree / alone.pair_at_once)}.",
            "- All this holds only if nobody waits for the slowest pair of the swarm. That one takes "
            f"{_short(alone.slowest_pair)}, and a tree only {_short(alone.tree / alone.slowest_pair)} times as long.",
        ]
    else:
        lines.append(
            "- With latencies that vary it holds only if nobody waits for the slowest pair of the swarm: "
            "try --sigma 0.5."
        )
    if conditions.transfer:
        lines.append(_of_bytes(last))
    return [*lines, _accuracy(points, conditions)]


def _of_bytes(point: LatencyPoint) -> str:
    n, ratios = point.replicas, point.ratios
    return (
        f"- Over a link a tree moves {2 * levels(n)} whole states in a row, a ring {2 * (n - 1) / n:.2f}, a pair 2, "
        "or 1 when both send at once. Where bytes outweigh latency, a ring takes at most twice as long as a pair; "
        f"here a tree {_short(ratios['tree_to_pair_at_once'])} times, a ring "
        f"{_short(ratios['ring_to_pair_at_once'])} times."
    )


def _accuracy(points: Sequence[LatencyPoint], conditions: Conditions) -> str:
    off = max(abs(p.simulated.tree / p.expected.tree - 1) for p in points)
    return (
        f"Monte Carlo, {conditions.samples:,} samples. The expected time of a tree, computed without sampling, "
        f"differs by {off:.1%} at most; a σ of 0 is exact."
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="underline")


def _short(value: float) -> str:
    """Three significant digits, whole numbers from 100 on."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
