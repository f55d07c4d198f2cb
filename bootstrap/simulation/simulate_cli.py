"""`noloco simulate`: what a setting would do, before anybody starts a node.

Options of `learning` that take a list, such as 4,8, are texts here; `learning_run` reads them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import OwnManifest, PresetToTrain
from node.command import fail
from protocol.errors import NolocoError

Method = Annotated[str, typer.Option(help="noloco, diloco, average, local or all-reduce (in every step).")]
Replicas = Annotated[str, typer.Option(help="Replicas per stage.")]
Stages = Annotated[str, typer.Option(help="Number of pipeline stages.")]
Routing = Annotated[str, typer.Option(help="Routing between stages: random or fixed.")]
InnerSteps = Annotated[str | None, typer.Option("-k", help="Inner steps per round.")]
Alpha = Annotated[str | None, typer.Option(help="Outer momentum.")]
Beta = Annotated[str | None, typer.Option(help="Gain on the pair's progress.")]
Gamma = Annotated[str | None, typer.Option(help="Pull toward the pair's mean.")]
Overlap = Annotated[str | None, typer.Option(help="Overlap of exchange and training: none or phi-early.")]
Staleness = Annotated[str | None, typer.Option(help="Staleness of the pipeline: 0 or 1 inner steps.")]
Codecs = Annotated[
    str | None, typer.Option(help="Codecs of activations/gradients, such as bf16 or int8/bf16.")
]
Steps = Annotated[int, typer.Option(min=1, help="Inner steps; the learning rate schedule spans them.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches per inner step of a replica.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences per microbatch.")]
Slow = Annotated[str, typer.Option(help="Slow one last-stage replica down by this factor.")]
Latency = Annotated[str, typer.Option(help="One-way latency of each link in milliseconds.")]
Mbit = Annotated[str, typer.Option(help="Bandwidth of each uplink in Mbit/s; 0 means no limit.")]
Seeds = Annotated[str, typer.Option(help="Random seeds; each one is a separate run.")]
Validation = Annotated[int, typer.Option(min=1, help="Number of held-out sequences to evaluate on.")]
Jobs = Annotated[int, typer.Option(min=1, help="Number of runs at a time, one core each.")]
Results = Annotated[
    Path | None, typer.Option(help="File to keep results in; an interrupted study resumes from it.")
]
Plot = Annotated[Path | None, typer.Option(help="Plot loss and spread against tokens to this SVG file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

CORES = os.cpu_count() or 1

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """Simulate a setting before anybody starts a node."""


@app.command()
def learning(
    preset: PresetToTrain = None,
    manifest: OwnManifest = None,
    method: Method = "noloco",
    replicas: Replicas = "4",
    stages: Stages = "2",
    routing: Routing = "random",
    k: InnerSteps = None,
    alpha: Alpha = None,
    beta: Beta = None,
    gamma: Gamma = None,
    overlap: Overlap = None,
    staleness: Staleness = None,
    codecs: Codecs = None,
    steps: Steps = 1000,
    microbatches: Microbatches = 1,
    sequences: Sequences = 2,
    slow: Slow = "1",
    latency: Latency = "0",
    mbit: Mbit = "0",
    seeds: Seeds = "0,1,2",
    validation_sequences: Validation = 512,
    jobs: Jobs = CORES,
    results: Results = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show how well a setting learns: every replica of every stage in one process, no network.

    Options that take a list, such as 4,8, are tried in every combination.
    """
    asked = {
        "method": method, "replicas": replicas, "stages": stages, "routing": routing, "inner_steps": k,
        "alpha": alpha, "beta": beta, "gamma": gamma, "overlap": overlap, "staleness": staleness,
        "wire": codecs, "slow": slow, "latency": latency, "mbit": mbit, "seed": seeds,
    }  # fmt: skip
    from bootstrap.simulation.learning_run import Study, run_and_show

    try:
        study = Study(preset, manifest, asked, steps, microbatches, sequences, validation_sequences)
        run_and_show(study, jobs, results, plot, as_json)
    except NolocoError as error:
        fail(error)
