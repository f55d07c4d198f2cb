"""The outcome of a simulated swarm and its checks: as tables, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from bootstrap.display import plain_table
from bootstrap.lab.simulated_swarm.swarm_checks import SwarmCheck
from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome

Row = tuple[str, str]


def rows_of(outcome: SwarmOutcome) -> list[Row]:
    """The rows that people read, in the order in which they ask."""
    idle = ", ".join(f"{cause} {share:.1%}" for cause, share in outcome.idle.items() if share >= 0.001)
    moved = ", ".join(f"{purpose} {_bytes(nbytes)}" for purpose, nbytes in outcome.bytes.items())
    rows: list[tuple[str, str | None]] = [
        ("throughput by the ideal of the peers present", _share(outcome.throughput)),
        ("idle, by what is waited for", idle or None),
        ("rounds", f"{outcome.rounds:,}"),
        ("pairing in round trips, median / 95th percentile", _pairing(outcome)),
        ("rounds alone", _share(outcome.alone)),
        ("proposals to one replica, deviations above the mean", _number(outcome.proposals)),
        ("partners met again, by chance", _number(outcome.again)),
        ("routing, most over mean of a stage", _number(outcome.imbalance)),
        ("resends / refusals of a microbatch and stage", f"{outcome.resends:.3%} / {outcome.refusals:.2%}"),
        ("bytes of a peer and minute", moved or None),
        ("newcomer useful after, median / 95th percentile", _useful(outcome)),
        ("moves / deaths", f"{outcome.moves} / {outcome.deaths}"),
        ("spread at the end, by the theory's", _number(outcome.spread)),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _pairing(outcome: SwarmOutcome) -> str | None:
    if outcome.pairing_median is None:
        return None
    return f"{outcome.pairing_median:.2f} / {outcome.pairing_p95:.1f}"


def _useful(outcome: SwarmOutcome) -> str | None:
    if outcome.useful_after is None:
        return None
    return f"{outcome.useful_after:.0f} s / {outcome.useful_p95:.0f} s"


def _bytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def show(outcome: SwarmOutcome, checks: Sequence[SwarmCheck], seconds: float) -> None:
    """Show the outcome on the terminal; `seconds` of the processor it took."""
    console = Console(markup=False)
    title = f"{outcome.scenario}: {outcome.peers:,} peers, {outcome.minutes:g} minutes, seed {outcome.seed}"
    table = plain_table(title, ("measured", "value"), left=("measured", "value"))
    for name, value in rows_of(outcome):
        table.add_row(name, value)
    console.print(table)
    if checks:
        listed = plain_table("Checks", ("check", "found", "allowed", ""), left=("check", "allowed", ""))
        for check in checks:
            found = "–" if check.found is None else f"{check.found:.3g}"
            listed.add_row(check.name, found, check.bound, "holds" if check.holds else "broken")
        console.print(listed)
    console.print(
        f"Simulated in {seconds:.0f} s of the processor; event log {outcome.digest}.", highlight=False
    )


def as_json(outcome: SwarmOutcome, checks: Sequence[SwarmCheck], seconds: float) -> str:
    contents = asdict(outcome) | {
        "checks": [asdict(check) for check in checks],
        "processor_seconds": round(seconds, 1),
    }
    return json.dumps(contents, indent=1)
