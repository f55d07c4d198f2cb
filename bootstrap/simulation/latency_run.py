"""What `noloco simulate latency` does: simulate every point, draw them, show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bootstrap.simulation.latency_points import simulated
from bootstrap.simulation.latency_report import Conditions, explanation, idle_table, json_of, sync_table


def simulate_and_show(
    sizes: Sequence[int],
    sigmas: Sequence[float],
    conditions: Conditions,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Raises `UserError` when the picture cannot be written."""
    points = simulated(sizes, sigmas, conditions, seed)
    if plot is not None:
        # matplotlib: only who plots waits for it
        from bootstrap.simulation.latency_plot import plot_latency

        plot_latency(points, plot)
    if as_json:
        print(json.dumps(json_of(points, conditions), indent=2))
        return
    console = Console()
    console.print(sync_table(points, conditions), "", idle_table(points, conditions), "", sep="\n")
    console.print("\n".join(explanation(points, conditions)), highlight=False, markup=False)
