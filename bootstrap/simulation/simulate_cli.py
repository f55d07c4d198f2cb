"""`noloco simulate`: what a setting would do, told before anybody starts a node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import OwnManifest, PresetToTrain
from node.command import fail
from protocol.errors import NolocoError

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """What a setting would do, told without a swarm."""


@app.command()
def learning(
    preset: PresetToTrain = None,
    manifest: OwnManifest = None,
    method: Annotated[
        str, typer.Option(help="noloco, diloco, average, local or all-reduce (in every step).")
    ] = "noloco",
    replicas: Annotated[str, typer.Option(help="Replicas per stage.")] = "4",
    stages: Annotated[str, typer.Option(help="Number of pipeline stages.")] = "2",
    routing: Annotated[str, typer.Option(help="Routing between stages: random or fixed.")] = "random",
    k: Annotated[str | None, typer.Option("-k", help="Inner steps per round.")] = None,
    alpha: Annotated[str | None, typer.Option(help="Outer momentum.")] = None,
    beta: Annotated[str | None, typer.Option(help="Gain on the pair's progress.")] = None,
    gamma: Annotated[str | None, typer.Option(help="Pull toward the pair's mean.")] = None,
    overlap: Annotated[
        str | None, typer.Option(help="Overlap of exchange and training: none or phi-early.")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(help="Staleness of the pipeline: 0 or 1 inner steps.")
    ] = None,
    codecs: Annotated[
        str | None, typer.Option(help="Codecs of activations/gradients, such as bf16 or int8/bf16.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Inner steps; the learning rate schedule spans them.")
    ] = 1000,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per inner step of a replica.")] = 1,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences per microbatch.")] = 2,
    slow: Annotated[str, typer.Option(help="Slow one last-stage replica down by this factor.")] = "1",
    latency: Annotated[str, typer.Option(help="One-way latency of each link in milliseconds.")] = "0",
    mbit: Annotated[str, typer.Option(help="Bandwidth of each uplink in Mbit/s; 0 means no limit.")] = "0",
    seeds: Annotated[str, typer.Option(help="Random seeds; each one is a separate run.")] = "0,1,2",
    validation_sequences: Annotated[
        int, typer.Option(min=1, help="Number of held-out sequences to evaluate on.")
    ] = 512,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of runs at a time, one core each.")
    ] = os.cpu_count() or 1,
    results: Annotated[
        Path | None, typer.Option(help="File to keep results in; an interrupted study resumes from it.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot loss and spread against tokens to this SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """How well a setting learns: every replica of every stage in one process, no network.

    Options that take a list, as 4,8, are tried in every combination.
    """
    from bootstrap.simulation.learning_run import Study, run_and_show

    asked = {
        "method": method, "replicas": replicas, "stages": stages, "routing": routing, "inner_steps": k,
        "alpha": alpha, "beta": beta, "gamma": gamma, "overlap": overlap, "staleness": staleness,
        "wire": codecs, "slow": slow, "latency": latency, "mbit": mbit, "seed": seeds,
    }  # fmt: skip
    try:
        study = Study(preset, manifest, asked, steps, microbatches, sequences, validation_sequences)
        run_and_show(study, jobs, results, plot, as_json)
    except NolocoError as error:
        fail(error)
