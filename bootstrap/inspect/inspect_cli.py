"""`noloco status`, `links`, `contributors`, `diagnose` and `doctor`: looks at a running swarm, and at a node here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bootstrap.display import plain_table, say
from bootstrap.inspect.node_limits import name_in
from bootstrap.model_options import AccessToken, Join
from node.command import doing, run_async
from node.machine.named import Use
from node.watch.health import Report, Unwell, directories, look
from node.watch.words import duration
from protocol.errors import NO


def status(
    join: Join = None,
    token: AccessToken = "",
    watch: Annotated[bool, typer.Option("--watch", help="Look again every five seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line for each look.")] = False,
    picture: Annotated[
        Path | None, Use.WRITE_FILE, typer.Option(help="Also save the table as an SVG file.")
    ] = None,
) -> None:
    """Say how a run is: in words, by stage, by node.

    Example: noloco status --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    doing("Looking at the run")
    from bootstrap.inspect.status import show_status

    run_async(show_status(join or [], token, picture, watch=watch, is_json=as_json))


def links(
    join: Join = None,
    token: AccessToken = "",
    out: Annotated[
        Path | None, Use.WRITE_FILE, typer.Option(help="Write a scenario for `noloco plan` to this file.")
    ] = None,
) -> None:
    """Show the links between a run's nodes, as they measured them.

    Example: noloco links --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    doing("Asking the run's nodes for their links")
    from bootstrap.inspect.link_map import show_links

    run_async(show_links(join or [], token, out))


def contributors(
    join: Join = None,
    token: AccessToken = "",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show who gave how much to a run, by what others signed for.

    It counts all lives of their nodes.

    Example: noloco contributors --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    doing("Asking the run's nodes for what others gave")
    from bootstrap.inspect.contributors import show_contributors

    run_async(show_contributors(join or [], token, json))


def diagnose(
    join: Join = None,
    token: AccessToken = "",
    state_dir: Annotated[Path, Use.READ_FOLDER, typer.Option(help="Of the node that a report is of.")] = Path(
        "noloco-state"
    ),
    out: Annotated[Path, Use.WRITE_FILE, typer.Option(help="File to write.")] = Path("noloco-diagnosis.json"),
) -> None:
    """Write one file for a bug report.

    It has versions, settings, the last events and log, and how the run is. Addresses, peers, names, paths and
    tokens are replaced by numbers. It says what is in it.

    Example: noloco diagnose --state-dir noloco-state
    """
    doing("Collecting what a report needs")
    from bootstrap.inspect.diagnosing import diagnose as write_diagnosis

    run_async(write_diagnosis(state_dir, join or [], token, out))


def doctor(
    join: Join = None,
    token: AccessToken = "",
    own: Annotated[
        Path | None,
        Use.READ_FOLDER,
        typer.Option(
            "--self",
            metavar="STATE-DIR",
            help="Look at the node, or seed peer, that runs here with this directory.",
        ),
    ] = None,
    state_dir: Annotated[
        Path, Use.WRITE_FOLDER, typer.Option(help="Where a node would keep its state.")
    ] = Path("noloco-state"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="TCP port to be dialled back at; 0 is any.")
    ] = 31337,
) -> None:
    """Check this machine, and with --join the way to a run.

    It looks at clock, port and uplink; with --self at a node that runs. Exit code 1 when something is wrong, 2 when
    a private run does not let it in. --self also shows the states of stages that the directory keeps. A seed peer's
    directory is the one that its keys are in.

    Example: noloco doctor --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    if own is not None:
        is_well = examine(own)
    else:
        doing("Looking at this machine")
        from bootstrap.inspect.doctor import examine_machine

        is_well = run_async(examine_machine(join or [], token, state_dir, host, port))
    if not is_well:
        sys.exit(NO)


def examine(directory: Path) -> bool:
    """Print a table for each node whose state is in `directory`; returns whether all are well."""
    console = Console(markup=False)
    well = [_examine_one(place, console) for place in directories(directory)]  # each is shown
    for place in directories(directory):
        _show_states(place, console)
    return all(well)


def _show_states(directory: Path, console: Console) -> None:
    """Print the states of stages that are kept there, if there are any."""
    if any(any(place.glob("checkpoint*.safetensors")) for place in (directory, directory / "copies")):
        from bootstrap.inspect.kept_states import states_table  # it imports torch

        if (table := states_table(directory, time.time())) is not None:
            console.print(table)


def _examine_one(directory: Path, console: Console) -> bool:
    try:
        report = look(directory)
    except Unwell as silence:
        say(console, f"Not well: {silence}.")
        return False
    console.print(table_of(report))
    problems = [] if report.get("healthy") else [str(report.get("reason"))]
    problems += [
        f"{part['part']} failed ({part['failure']}) and is started again soon; node.log has more"
        for part in report.get("parts", [])
        if part["state"] == "failed"
    ]
    for problem in problems:
        say(console, f"Not well: {problem}.")
    return not problems


def table_of(report: Report) -> Table:
    """The table of a node, with a line for each part."""
    title = f"node {name_in(report)}  {report.get('state')}"
    if "stage" in report:
        title += f"  stage {report['stage']}  step {report['step']}  round {report['round']}"
    headings = ("part", "state", "since", "restarts", "last failure")
    table = plain_table(title, headings, left=("part", "state", "last failure"))
    for part in report.get("parts", []):
        since, restarts = duration(part["seconds"]) if part["seconds"] else "0 s", str(part["restarts"])
        table.add_row(part["part"], part["state"], since, restarts, part["failure"] or "-")
    return table
