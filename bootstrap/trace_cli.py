"""`noloco trace`: where the time of nodes went, as a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bootstrap.trace_report import Idle, NodeTime, time_of_nodes
from node.command import fail
from protocol.errors import StateError

LEAST_SHOWN = 0.0005  # of the time: shorter jobs have no line of their own


def show_trace(
    files: Annotated[list[Path], typer.Argument(help="Traces of one machine's nodes, from --trace.")],
    skip: Annotated[float, typer.Option(min=0.0, help="Seconds at the beginning to leave out.")] = 0.0,
) -> None:
    """Show where the time of nodes went: what they computed and what they stood still for."""
    try:
        nodes = time_of_nodes(files, skip)
    except StateError as error:
        fail(error)
    Console().print(_table(nodes))


def _table(nodes: list[NodeTime]) -> Table:
    table = Table(
        caption="percent of each node's time; an idle instant counts under the first cause that fits"
    )
    table.add_column("")
    for node in nodes:
        table.add_column(f"{node.name}\n{node.seconds:.1f} s", justify="right")

    def line(name: str, share: Callable[[NodeTime], float], style: str = "") -> None:
        shares = [share(node) for node in nodes]
        table.add_row(name, *(f"{100 * value:.1f}" for value in shares), style=style)

    line("computing", lambda node: node.computing, "bold")
    for job in dict.fromkeys(job for node in nodes for job in node.jobs):
        if any(node.jobs.get(job, 0.0) >= LEAST_SHOWN for node in nodes):
            line(f"  {job}", lambda node, job=job: node.jobs.get(job, 0.0))  # type: ignore[misc]
    line("idle", lambda node: 1.0 - node.computing, "bold")
    for cause in Idle:
        line(f"  {cause}", lambda node, cause=cause: node.idle[cause])  # type: ignore[misc]
    return table
