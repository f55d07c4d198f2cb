"""`noloco trace`: where the time of nodes went, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.command import fail
from node.machine.named import Use
from protocol.errors import StateError


def show_trace(
    files: Annotated[
        list[Path],
        Use.READ_FILE,
        typer.Argument(help="Trace files that --trace wrote, of one machine's nodes."),
    ],
    skip: Annotated[float, typer.Option(min=0.0, help="Seconds to skip at the beginning.")] = 0.0,
) -> None:
    """Show what nodes computed, and what they stood still for.

    Example: noloco trace trace.json
    """
    from rich.console import Console

    from bootstrap.traces import table_of, time_of_nodes

    try:
        nodes = time_of_nodes(files, skip)
    except StateError as error:
        fail(error)
    Console(markup=False).print(table_of(nodes))
