"""`noloco links`: how far apart the nodes of a swarm are, as they have measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import Join
from node.command import run_async


def links(
    join: Join = None,
    out: Annotated[Path | None, typer.Option(help="Write a scenario for `noloco plan` to this file.")] = None,
) -> None:
    """Show the links between a running swarm's nodes, as measured by themselves."""
    from bootstrap.inspect.link_table import show_links

    run_async(show_links(join or [], out))
