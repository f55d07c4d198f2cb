"""What `noloco doctor --self` shows: the parts of a running node, since when they run, and what stopped them."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bootstrap.display import plain_table
from node.watch.health import Report, Unwell, directories, look


def examine(directory: Path) -> bool:
    """Print a table for each node whose state is there; whether all are well."""
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
    problems = problems_in(report)
    for problem in problems:
        console.print(f"Not well: {problem}.", soft_wrap=True, highlight=False)
    return not problems


def problems_in(report: Report) -> list[str]:
    """What is wrong, in words; nothing when the node is well."""
    found = [] if report.get("healthy") else [str(report.get("reason"))]
    return found + [
        f"{part['part']} failed ({part['failure']}) and is started again soon; node.log has more"
        for part in report.get("parts", [])
        if part["state"] == "failed"
    ]


def table_of(report: Report) -> Table:
    """A line for each part."""
    title = f"node …{str(report.get('peer'))[-8:]}  {report.get('state')}"
    if "stage" in report:
        title += f"  stage {report['stage']}  step {report['step']}  round {report['round']}"
    headings = ("part", "state", "since", "restarts", "last failure")
    table = plain_table(title, headings, left=("part", "state", "last failure"))
    for part in report.get("parts", []):
        table.add_row(
            part["part"],
            part["state"],
            _duration(part["seconds"]),
            str(part["restarts"]),
            part["failure"] or "-",
        )
    return table


def _duration(seconds: float) -> str:
    """ "12 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
