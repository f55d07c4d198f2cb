"""Where the time of nodes went, as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from bootstrap.traces.report import Idle, NodeTime

LEAST_SHOWN = 0.0005  # of the time: shorter jobs have no line of their own


def table_of(nodes: list[NodeTime]) -> Table:
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
