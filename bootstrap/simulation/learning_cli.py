"""`noloco simulate learning`: settings from the command line, every combination of them, tried over seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bootstrap.founding import chosen_manifest
from bootstrap.simulation.learning import Outcome
from bootstrap.simulation.learning_plot import plot_learning
from bootstrap.simulation.learning_settings import combinations, one_setting
from bootstrap.simulation.study import rows, run_study
from node.command import fail
from protocol.errors import NolocoError

SHOWN = {  # how columns are called in the table
    "learning_rate": "lr",
    "microbatches": "micro-\nbatches",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
}


def learning(
    preset: Annotated[str | None, typer.Option(help="Preset to train; default: tiny.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="A manifest of your own (TOML).")] = None,
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
    console = Console(stderr=True)
    asked = {
        "method": method, "replicas": replicas, "stages": stages, "routing": routing, "inner_steps": k,
        "alpha": alpha, "beta": beta, "gamma": gamma, "overlap": overlap, "staleness": staleness,
        "wire": codecs, "slow": slow, "latency": latency, "mbit": mbit, "seed": seeds,
    }  # fmt: skip
    try:
        base = chosen_manifest(preset, manifest)
        settings = [
            one_setting(
                base, steps, microbatches, sequences, validation_sequences=validation_sequences, **chosen
            )
            for chosen in combinations(base, asked)
        ]
        outcomes = run_study(settings, results, jobs, lambda o, done, of: _tell(console, o, done, of))
    except NolocoError as error:
        fail(error)
    if plot is not None:
        plot_learning(outcomes, plot)
    if as_json:
        print(json.dumps({"simulation": "learning", "results": rows(outcomes)}, indent=2))
    else:
        Console().print(table_of(outcomes))


def _tell(console: Console, outcome: Outcome, done: int, total: int) -> None:
    facts = outcome.setting
    console.print(
        f"{done}/{total}  {facts['method']} {facts['replicas']} × {facts['stages']} k={facts['k']} "
        f"{facts['activations']}/{facts['gradients']} seed {facts['seed']}: "
        f"loss {outcome.loss:.3f}, spread {outcome.spread:.1e} ({outcome.wall_seconds:.0f} s)",
        highlight=False,
    )


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A row for each setting: what distinguishes it, then what came of it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    found = rows(outcomes)
    measured = {"loss", "loss_deviation", "loss_by_seed", "loss_of_mean", "spread", "bytes_per_token"}
    measured |= {"bytes_per_replica", "rounds", "paired", "blocked", "tokens", "seeds"}
    columns = [name for name in (found[0] if found else {}) if name not in measured]
    for name in columns:
        table.add_column(SHOWN.get(name, name))
    for name in ("loss", "by seed", "mean's", "spread", "bytes/\ntoken", "rounds", "paired", "blocked"):
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(
            *(f"{row[name]:g}" if isinstance(row[name], float) else str(row[name]) for name in columns),
            f"{row['loss']:.3f}",
            " ".join(f"{loss:.3f}" for loss in row["loss_by_seed"].values()),
            f"{row['loss_of_mean']:.3f}",
            f"{row['spread']:.1e}",
            f"{row['bytes_per_token']:.1f}",
            f"{row['rounds']:.0f}",
            f"{row['paired']:.0%}",
            f"{row['blocked']:.1%}",
        )
    return table
