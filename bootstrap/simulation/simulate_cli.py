"""`noloco simulate`: what a setting would do, told before anybody starts a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.simulation.learning_cli import learning
from node.command import fail
from protocol.errors import NolocoError, UserError

MAX_REPLICAS = 65_536  # some 10 s for each σ
MAX_SIGMA = 2.0  # a message in 40 takes over 50 times the median; the distributions' grid ends there

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """What a setting would do, told without a swarm."""


app.command()(learning)


@app.command()
def latency(
    replicas: Annotated[
        str, typer.Option(help="A list such as 8,64, or one number for all powers of two up to it.")
    ] = "1024",
    sigma: Annotated[
        str, typer.Option(help="Spread σ of latencies: each is the median times exp(σZ).")
    ] = "0,0.5,1",
    samples: Annotated[
        int, typer.Option(min=10, max=1_000_000, help="Number of synchronisations to simulate.")
    ] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    latency_ms: Annotated[
        float, typer.Option(min=0.001, help="Median one-way latency in milliseconds.")
    ] = 50.0,
    bandwidth: Annotated[
        float, typer.Option(min=0, help="Bandwidth of each link in Mbit/s; 0 means no limit.")
    ] = 0.0,
    state_bytes: Annotated[
        int,
        typer.Option(
            min=0, help="Bytes that a replica sends per synchronisation; see noloco manifest check."
        ),
    ] = 0,
    k: Annotated[int, typer.Option("-k", "--steps", min=1, help="Inner steps per round.")] = 50,
    step_ms: Annotated[
        float, typer.Option(min=0.001, help="Mean compute time of an inner step in milliseconds.")
    ] = 1000.0,
    step_variation: Annotated[
        float, typer.Option(min=0, max=3, help="Relative standard deviation of a step's compute time.")
    ] = 0.3,
    plot: Annotated[
        Path | None, typer.Option(help="Draw both tables to this .svg, .png or .pdf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tree and ring all-reduce against pair gossip: time to synchronise, and time blocked, over N replicas."""
    try:
        sizes, sigmas = replica_counts(replicas), variations(sigma)
        if bool(bandwidth) != bool(state_bytes):
            raise UserError(
                "Give --bandwidth and --state-bytes together: both are needed for the bytes' time."
            )
        from bootstrap.simulation.latency_report import Conditions
        from bootstrap.simulation.latency_run import simulate_and_show

        seconds = state_bytes * 8 / (bandwidth * 1e6) if bandwidth else 0.0
        conditions = Conditions(
            latency=latency_ms / 1000,
            transfer=seconds / (latency_ms / 1000),
            inner_steps=k,
            step=step_ms / 1000,
            variation=step_variation,
            samples=samples,
        )
        simulate_and_show(sizes, sigmas, conditions, seed, plot, as_json)
    except NolocoError as error:
        fail(error)


def replica_counts(text: str) -> list[int]:
    """From "8,64" those two; from "1000" 2, 4, … 512, 1000. Raises `UserError`."""
    try:
        listed = sorted({int(part) for part in text.split(",")})
    except ValueError:
        listed = []
    if not listed or listed[0] < 2 or listed[-1] > MAX_REPLICAS:
        raise UserError(
            f"--replicas {text!r}: give whole numbers from 2 to {MAX_REPLICAS}, separated by commas."
        )
    if len(listed) > 1:
        return listed
    most = listed[0]
    return sorted({*(2**power for power in range(1, most.bit_length())), most})


def variations(text: str) -> list[float]:
    """The σ of a list as 0,0.5,1. Raises `UserError`."""
    try:
        listed = sorted({float(part) for part in text.split(",")})
    except ValueError:
        listed = []
    if not listed or not all(0 <= sigma <= MAX_SIGMA for sigma in listed):
        raise UserError(f"--sigma {text!r}: give numbers from 0 to {MAX_SIGMA:g}, separated by commas.")
    return listed
