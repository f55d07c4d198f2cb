"""`noloco simulate`: what a setting would do, told before anybody starts a node."""

from __future__ import annotations

import typer

from bootstrap.simulation.learning_cli import learning

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """What a setting would do, told without a swarm."""


app.command()(learning)
