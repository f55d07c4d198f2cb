"""`noloco simulate learning`: settings from the command line, every combination of them, tried over seeds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import OwnManifest, PresetToTrain
from node.command import fail
from protocol.errors import NolocoError


def learning(
    preset: PresetToTrain = None,
    manifest: OwnManifest = None,
    method: Annotated[
        str, typer.Option(help="noloco, diloco, average, local, all-reduce (in every step).")
    ] = "noloco",
    replicas: Annotated[str, typer.Option(help="Replicas of each stage.")] = "4",
    stages: Annotated[str, typer.Option(help="Pipeline stages.")] = "2",
    routing: Annotated[str, typer.Option(help="random or fixed.")] = "random",
    k: Annotated[str | None, typer.Option("-k", help="Inner steps of a round.")] = None,
    alpha: Annotated[str | None, typer.Option(help="Outer momentum.")] = None,
    beta: Annotated[str | None, typer.Option(help="Gain on the pair's progress.")] = None,
    gamma: Annotated[str | None, typer.Option(help="Pull toward the pair's mean.")] = None,
    overlap: Annotated[str | None, typer.Option(help="none, phi-early, late.")] = None,
    staleness: Annotated[str | None, typer.Option(help="0 or 1 inner steps.")] = None,
    codecs: Annotated[str | None, typer.Option(help="Of activations/gradients: bf16 or int8/bf16.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps; the learning rate follows.")] = 1000,
    microbatches: Annotated[int, typer.Option(min=1, help="Of one inner step of a replica.")] = 1,
    sequences: Annotated[int, typer.Option(min=1, help="Of one microbatch.")] = 2,
    slow: Annotated[str, typer.Option(help="One last-stage replica computes this many times slower.")] = "1",
    latency: Annotated[str, typer.Option(help="Of each link one way, in milliseconds.")] = "0",
    mbit: Annotated[str, typer.Option(help="Of each uplink, per second; 0: no limit.")] = "0",
    seeds: Annotated[str, typer.Option(help="Each seed is a run.")] = "0,1,2",
    validation_sequences: Annotated[int, typer.Option(min=1, help="Held-out sequences to measure on.")] = 512,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = os.cpu_count() or 1,
    results: Annotated[Path | None, typer.Option(help="Keep outcomes here, and go on from them.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Loss and spread against tokens, as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
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
