"""`noloco dashboard` and `noloco watch`: a run on a page, in Prometheus, in TensorBoard, in Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import AccessToken, Join
from node.command import doing, fail, run_async
from node.machine.listening import require_place
from node.machine.named import Use
from protocol.errors import NolocoError, UserError

LISTEN = "127.0.0.1:8765"


def dashboard(
    join: Join = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where browsers find it; 0.0.0.0:PORT lets everybody.")
    ] = LISTEN,
    replay: Annotated[
        list[Path] | None,
        Use.READ,
        typer.Option(
            metavar="FILE", help="Show a run that is over: events.jsonl of its nodes, one after another."
        ),
    ] = None,
    token: AccessToken = "",
    beside: Annotated[
        Path | None,
        Use.READ_FOLDER,
        typer.Option(metavar="DIR", hidden=True, help="State directory of the node that the page is beside."),
    ] = None,
) -> None:
    """Show a run on a web page, and its metrics at /metrics.

    Example: noloco dashboard --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW… --listen 127.0.0.1:8765
    """
    try:
        host, port = require_place(listen or LISTEN, "--listen")
        if join and replay:
            raise UserError(
                "Name a run that goes on, --join ADDRESS of any member, or one that is over, --replay events.jsonl."
            )
    except NolocoError as error:
        fail(error)
    doing("Starting the page")
    from bootstrap.dashboard import running

    run_async(
        running.replay(replay, host, port)
        if replay
        else running.show_dashboard(join or [], host, port, token, beside)
    )


def watch(
    join: Join = None,
    token: AccessToken = "",
    tensorboard: Annotated[
        Path | None,
        Use.WRITE_FOLDER,
        typer.Option(metavar="DIR", help="Write event files for TensorBoard to this directory."),
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to this project of Weights & Biases.")
    ] = None,
    events: Annotated[
        Path | None,
        Use.WRITE_FILE,
        typer.Option(metavar="FILE", help="Append the curves to this file, one JSON object a line."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Between two points of the curves.")] = 10,
) -> None:
    """Follow a run and write its curves for other programs.

    Example: noloco watch --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW… --tensorboard runs/mine
    """
    if not (tensorboard or wandb or events):
        fail(UserError("Say where the curves go: --tensorboard DIR, --wandb PROJECT or --events FILE."))
    doing("Following the run")
    from bootstrap.dashboard.watching import Destinations, follow

    run_async(follow(join or [], token, Destinations(tensorboard, wandb, events), seconds))
