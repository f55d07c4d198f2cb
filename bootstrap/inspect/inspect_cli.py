"""`noloco status`, `links` and `doctor`: looks at a running swarm, and at a node on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import Join
from node.command import run_async


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
        typer.Option(
            "--self", metavar="STATE-DIR", help="State directory of a node that runs on this machine."
        ),
    ],
) -> None:
    """Show what a running node does in the background; exit code 1 when something is wrong.

    A seed peer's is the directory that its keys are in.
    """
    from bootstrap.inspect.doctor import examine

    if not examine(state_dir):
        sys.exit(1)
