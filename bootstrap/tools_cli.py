"""`noloco`: tools for people. A swarm on this machine, and looks into one that runs anywhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from bootstrap.evaluation import evaluate_route
from bootstrap.export import export_route
from bootstrap.founding import chosen_manifest
from bootstrap.links_cli import links
from bootstrap.local_swarm import LocalSwarm, Plan
from bootstrap.manifest_cli import app as manifest_tools
from bootstrap.observer import visit
from bootstrap.plan_cli import plan
from bootstrap.simulate_cli import app as simulate
from bootstrap.summary import Summary
from bootstrap.table import Picture, places, save_svg, show
from bootstrap.trace_cli import show_trace
from node.command import fail, run_async
from node.data.corpus import load_corpus
from node.machine.signals import on_interrupt
from node.watch.log import set_up_logging
from protocol.errors import DataError, NolocoError
from protocol.manifest import Manifest, manifest_from

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True
)
app.add_typer(manifest_tools, name="manifest")
app.add_typer(simulate, name="simulate")
app.command("trace")(show_trace)
app.command()(plan)
app.command()(links)

Join = Annotated[list[str] | None, typer.Option(help="Address of any member of the run.")]


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
    preset: Annotated[str | None, typer.Option(help="Preset to train; default: tiny.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="A manifest of your own (TOML).")] = None,
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
    torch.set_num_threads(1)  # the nodes need the cores
    console = Console()
    try:
        wanted = adapted(chosen_manifest(preset, manifest), stages, steps)
    except NolocoError as error:
        fail(error)
    place = directory or Path(tempfile.mkdtemp(prefix="noloco-swarm-"))
    plan = Plan(wanted, replicas, place, minutes, validation_sequences, summary, picture, trace)
    result = run_async(_swarm(plan, console))
    console.print("\n".join(result.lines()), soft_wrap=True, highlight=False)
    console.print(f"summary          {summary}", soft_wrap=True, highlight=False)
    if not result.complete:
        sys.exit(130)


async def _swarm(plan: Plan, console: Console) -> Summary:
    local = LocalSwarm(plan, console)
    on_interrupt(lambda _: local.stop())
    return await local.run()


def adapted(manifest: Manifest, stages: int | None, steps: int) -> Manifest:
    """The manifest with another number of stages or steps, validated anew."""
    contents = manifest.model_dump()
    if stages is not None:
        contents["stages"] = stages
    contents["inner"]["total_steps"] = steps
    contents["inner"]["warmup_steps"] = min(contents["inner"]["warmup_steps"], steps - 1)
    return manifest_from(contents)


@app.command()
def status(
    join: Join = None,
    picture: Annotated[Path | None, typer.Option(help="Also save the table as an SVG file.")] = None,
) -> None:
    """Show a running swarm as seen from outside."""
    run_async(_status(join or [], picture))


async def _status(join: list[str], file: Path | None) -> None:
    async with visit(join) as observer:
        sightings = await observer.look()
        manifest = observer.manifest
        picture = Picture(
            title=f"run '{manifest.name}'  {observer.signed.run_id}  {manifest.stages} stages",
            seconds=max((s.stats.uptime for s in sightings if s.stats is not None), default=0.0),
            expected=0,
            sightings=sightings,
            names={},
            validation=(),
        )
        show(Console(), picture)
        print("\n".join(places(picture)))
        if file is not None:
            save_svg(file, picture)


@app.command("eval")
def evaluate(
    join: Join = None,
    sequences: Annotated[int, typer.Option(min=1, help="Held-out sequences to measure on.")] = 256,
    data: Annotated[list[str] | None, typer.Option(help="Text files or globs instead of the run's.")] = None,
    every_replica: Annotated[bool, typer.Option(help="Measure each replica, not one of each stage.")] = False,
) -> None:
    """Measure the validation loss of a running swarm."""
    run_async(_evaluate(join or [], sequences, data or [], every_replica))


async def _evaluate(join: list[str], sequences: int, data: list[str], every_replica: bool) -> None:
    async with visit(join) as observer:
        source = data or observer.manifest.data.source
        if source == "local":
            raise DataError("This run trains on its volunteers' own text: name some with --data FILE.")
        corpus = load_corpus(source, observer.manifest.data.held_out)
        routes = await observer.routes()
        losses = []
        for route in routes if every_replica else routes[:1]:
            with _progress("Evaluating", sequences) as advance:
                loss = await evaluate_route(observer, corpus, route, sequences, advance)
            print(f"{loss.nats:.4f} nats per byte on {loss.tokens:,} tokens, through {_short(route)}")
            losses.append(loss.nats)
        if len(losses) > 1:
            print(f"{sum(losses) / len(losses):.4f} nats per byte, mean over {len(losses)} routes")


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Directory for the checkpoint.")],
    join: Join = None,
) -> None:
    """Write a Hugging Face checkpoint from one replica of each stage of a running swarm."""
    run_async(_export(join or [], out))


async def _export(join: list[str], out: Path) -> None:
    async with visit(join) as observer:
        route = (await observer.routes())[0]
        exported = await export_route(observer, route, out, print)
        print(f"Wrote {exported.parameters:,} parameters to {out}. Load it with:")
        print(f"  transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")


class _progress:
    """A progress bar that is silent without a terminal."""

    def __init__(self, doing: str, total: int) -> None:
        self._bar = Progress(transient=True, disable=not sys.stdout.isatty())
        self._task = self._bar.add_task(doing, total=total)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _short(route: Sequence[str]) -> str:
    return " → ".join(peer[-8:] for peer in route)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
