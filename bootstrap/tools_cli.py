"""`noloco`: tools for people. A swarm on this machine, and looks into one that runs anywhere.

The command modules hold options, and import what does the work when a command is called with ones that can be used:
--help and mistakes come at once, and nobody waits for torch or transformers who does not need them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.checking.manifest_cli import app as manifest_tools
from bootstrap.evaluation.eval_cli import evaluate
from bootstrap.export.export_cli import export
from bootstrap.generation.generate_cli import generate
from bootstrap.looking.doctor_cli import doctor
from bootstrap.looking.links_cli import links
from bootstrap.model_options import (
    DataOption,
    FromCheckpoint,
    Join,
    OwnManifest,
    PresetToTrain,
    RunTokenizer,
    TextFieldOption,
)
from bootstrap.planning.plan_cli import plan
from bootstrap.simulation.simulate_cli import app as simulate
from bootstrap.traces.trace_cli import show_trace
from node.command import fail, run_async
from node.data.paths import DEFAULT_FIELD
from node.watch.log import set_up_logging
from protocol.errors import NolocoError

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True
)
app.add_typer(manifest_tools, name="manifest")
app.add_typer(simulate, name="simulate")
app.command("trace")(show_trace)
app.command()(plan)
app.command()(links)
app.command()(doctor)
app.command()(export)
app.command()(generate)
app.command("eval")(evaluate)


@app.callback()
def noloco() -> None:
    """Tools around a noloco run: try it on this machine, watch it, measure it, take the model out."""
    set_up_logging(verbose=False)


@app.command()
def swarm(
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Replicas of each stage.")] = 3,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages; default: the manifest's.")
    ] = None,
    preset: PresetToTrain = None,
    manifest: OwnManifest = None,
    data: DataOption = None,
    text_field: TextFieldOption = DEFAULT_FIELD,
    tokenizer: RunTokenizer = "",
    from_checkpoint: FromCheckpoint = None,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps; the learning rate follows.")] = 1000,
    minutes: Annotated[float, typer.Option(min=0.1, help="Stop training after this time.")] = 5.0,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep everything here; default: a new temporary directory.")
    ] = None,
    summary: Annotated[Path, typer.Option(help="Where the summary goes.")] = Path("summary.json"),
    picture: Annotated[Path | None, typer.Option(help="Save the last table as an SVG file.")] = None,
    validation_sequences: Annotated[int, typer.Option(min=1, help="Held-out sequences to measure on.")] = 256,
    trace: Annotated[
        Path | None, typer.Option(help="Write where all nodes' time goes to this file, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Train one model with a whole swarm of real peers on this machine, and export it."""
    import torch
    from rich.console import Console

    from bootstrap.founding.choosing import RunOptions
    from bootstrap.local.swarm import Plan, run_swarm

    torch.set_num_threads(1)  # the nodes need the cores
    console = Console()
    try:
        options = RunOptions(preset, manifest, tokenizer, "", from_checkpoint, stages, steps)
        wanted, raw = options.resolved()
    except NolocoError as error:
        fail(error)
    place = directory or Path(tempfile.mkdtemp(prefix="noloco-swarm-"))
    plan = Plan(
        wanted, replicas, place, minutes, validation_sequences, summary, picture, trace,
        data=tuple(data or ()), text_field=text_field, tokenizer=raw, from_checkpoint=from_checkpoint,
    )  # fmt: skip
    result = run_async(run_swarm(plan, console))
    console.print("\n".join(result.lines()), soft_wrap=True, highlight=False)
    console.print(f"summary          {summary}", soft_wrap=True, highlight=False)
    if not result.complete:
        sys.exit(130)


@app.command()
def status(
    join: Join = None,
    picture: Annotated[Path | None, typer.Option(help="Also save the table as an SVG file.")] = None,
) -> None:
    """Show a running swarm as seen from outside."""
    from bootstrap.looking.status import show_status

    run_async(show_status(join or [], picture))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
