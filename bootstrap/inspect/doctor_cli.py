"""`noloco doctor`: is the node on this machine well?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


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
