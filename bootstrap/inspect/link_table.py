"""What `noloco links` shows: a line for each node of a swarm, and a scenario for `noloco plan`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bootstrap.inspect.link_map import LinkMap, link_map, scenario_of, seen_from_outside
from bootstrap.inspect.observer import visit
from protocol.errors import StateError


async def show_links(join: list[str], out: Path | None) -> None:
    async with visit(join) as observer:
        manifest = observer.manifest
        found = link_map(seen_from_outside(await observer.survey(), manifest))
        Console().print(table_of(found, manifest.name))
        if out is not None:
            write_scenario(out, scenario_of(found, manifest))
            print(f"Wrote {out}. Plan with:\n  noloco plan --scenario {out} --stages {manifest.stages}")


def write_scenario(file: Path, scenario: dict[str, object]) -> None:
    """Raises `StateError` when the file cannot be written."""
    try:
        file.write_text(json.dumps(scenario), encoding="utf-8")
    except OSError as error:
        raise StateError(
            f"Cannot write the scenario {file} ({error.strerror}). Name another --out."
        ) from None


def table_of(found: LinkMap, name: str) -> Table:
    """A line for each node: medians over its links that were measured, and its nearest peer."""
    table = Table(
        title=f"run '{name}'  {found.measured} of {found.pairs} pairs measured",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold underline",
    )
    for heading in ("node", "stage", "links", "latency ms", "nearest", "ms", "up Mbit/s", "±"):
        table.add_column(heading, justify="left" if heading in ("node", "nearest") else "right", no_wrap=True)
    for i, peer in enumerate(found.peers):
        latency = found.latency_s[i] * 1e3
        known = np.flatnonzero(~np.isnan(latency))
        nearest = known[np.argmin(latency[known])] if len(known) else None
        table.add_row(
            peer[-8:],
            str(found.stages[i]),
            str(len(known)),
            _median(latency, ".1f"),
            found.peers[nearest][-8:] if nearest is not None else "-",
            f"{latency[nearest]:.1f}" if nearest is not None else "-",
            _median(found.bandwidth[i] * 8e-6, ".1f"),
            _median(found.uncertainty[i], ".0%"),
        )
    return table


def _median(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], form: str) -> str:
    """A dash when nothing was measured."""
    known = values[~np.isnan(values)]
    return format(float(np.median(known)), form) if len(known) else "-"
