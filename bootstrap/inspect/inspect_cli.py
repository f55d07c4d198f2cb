"""`noloco status`, `links` and `doctor`: looks at a running swarm, and at a node on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bootstrap.display import plain_table
from bootstrap.model_options import Join
from node.command import run_async
from node.watch.health import Report, Unwell, directories, look


def status(
    join: Join = None,
    picture: Annotated[Path | None, typer.Option(help="Also save the table as an SVG file.")] = None,
) -> None:
    """Show a running swarm as seen from outside."""
    from bootstrap.inspect.table import show_status

    run_async(show_status(join or [], picture))


def links(
    join: Join = None,
    out: Annotated[Path | None, typer.Option(help="Write a scenario for `noloco plan` to this file.")] = None,
) -> None:
    """Show the links between a running swarm's nodes, as measured by themselves."""
    from bootstrap.inspect.link_map import show_links

    run_async(show_links(join or [], out))


def doctor(
    state_dir: Annotated[
        Path,
        typer.Option("--self", metavar="STATE-DIR", help="State directory of a node on this machine."),
    ],
) -> None:
    """Show what a running node does in the background; exit code 1 when something is wrong.

    A seed peer's is the directory that its keys are in.
    """
    if not examine(state_dir):
        sys.exit(1)


def examine(directory: Path) -> bool:
    """Print a table for each node whose state is in `directory`; returns whether all are well."""
    console = Console()
    well = [_examine_one(place, console) for place in directories(directory)]  # each is shown
    return all(well)


def _examine_one(directory: Path, console: Console) -> bool:
    try:
        report = look(directory)
    except Unwell as silence:
        console.print(f"Not well: {silence}.", soft_wrap=True, highlight=False)
        return False
    console.print(table_of(report))
    problems = [] if report.get("healthy") else [str(report.get("reason"))]
    problems += [
        f"{part['part']} failed ({part['failure']}) and is started again soon; node.log has more"
        for part in report.get("parts", [])
        if part["state"] == "failed"
    ]
    for problem in problems:
        console.print(f"Not well: {problem}.", soft_wrap=True, highlight=False)
    return not problems


def table_of(report: Report) -> Table:
    """A line for each part."""
    title = f"node …{str(report.get('peer'))[-8:]}  {report.get('state')}"
    if "stage" in report:
        title += f"  stage {report['stage']}  step {report['step']}  round {report['round']}"
    headings = ("part", "state", "since", "restarts", "last failure")
    table = plain_table(title, headings, left=("part", "state", "last failure"))
    for part in report.get("parts", []):
        since, restarts = _duration(part["seconds"]), str(part["restarts"])
        table.add_row(part["part"], part["state"], since, restarts, part["failure"] or "-")
    return table


def _duration(seconds: float) -> str:
    """ "12 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
