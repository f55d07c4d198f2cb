"""How long synchronising takes: tree and ring all-reduce against the exchange of a pair, over N replicas.

Prints two tables, the time of one synchronisation and the share of time that replicas are blocked, and where the
paper's factor of ten comes from; docs/latency.md discusses them. Ratios, for the most replicas asked for and each σ:
`tree_to_pair_via_one`, `tree_to_pair_at_once`, `ring_to_pair_at_once`, `tree_to_slowest_pair` and
`blocked_all_reduce_to_pair`, whose pairs are drawn again for each round.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from reporting.report import Report, arguments_of, parser_of, run
from rich.console import Console
from synchronising.idle import Round, blocked
from synchronising.picture import plot_latency
from synchronising.sync_times import expected_sync, simulate_sync
from synchronising.tables import Conditions, LatencyPoint, explanation, idle_table, sync_table

from protocol.errors import UserError

MAX_REPLICAS = 65_536  # some 10 s for each σ
MAX_SIGMA = 2.0  # a message in 40 takes over 50 times the median; the distributions' grid ends there


def simulated(
    sizes: Sequence[int], sigmas: Sequence[float], conditions: Conditions, seed: int
) -> list[LatencyPoint]:
    """Every σ for every number of replicas, each from random numbers of its own."""
    rounds = Round(conditions.inner_steps, conditions.step / conditions.latency, conditions.variation)
    expected = {sigma: expected_sync(list(sizes), sigma, conditions.transfer) for sigma in sigmas}
    points = []
    for n, sigma in itertools.product(sizes, sigmas):
        # by σ and N, so that a point is the same whatever else is asked for
        generator = np.random.default_rng([seed, n, round(sigma * 1e6)])
        sync = simulate_sync(n, sigma, conditions.samples, generator, conditions.transfer)
        standing = blocked(n, rounds, sync, sigma, conditions.transfer, generator)
        points.append(LatencyPoint(n, sigma, sync, expected[sigma][n], standing))
    return points


def ratios_of(points: Sequence[LatencyPoint]) -> dict[str, float]:
    """The ratios of the largest swarm, by σ."""
    most = max(point.replicas for point in points)
    ratios = {}
    for point in (point for point in points if point.replicas == most):
        blocked_ratio = point.blocked.all_reduce / point.blocked.pair_every_round
        for name, ratio in {**point.ratios, "blocked_all_reduce_to_pair": blocked_ratio}.items():
            ratios[f"{name}_{most}_sigma_{point.sigma:g}"] = round(ratio, 3)
    return ratios


def replica_counts(text: str) -> list[int]:
    """From "8,64" those two; from "1000" 2, 4, … 512, 1000."""
    try:
        listed = sorted({int(part) for part in text.split(",")})
    except ValueError:
        listed = []
    if not listed or listed[0] < 2 or listed[-1] > MAX_REPLICAS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give whole numbers from 2 to {MAX_REPLICAS}, separated by commas."
        )
    if len(listed) > 1:
        return listed
    most = listed[0]
    return sorted({*(2**power for power in range(1, most.bit_length())), most})


def variations(text: str) -> list[float]:
    """The σ of a list such as 0,0.5,1."""
    try:
        listed = sorted({float(part) for part in text.split(",")})
    except ValueError:
        listed = []
    if not listed or not all(0 <= sigma <= MAX_SIGMA for sigma in listed):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give numbers from 0 to {MAX_SIGMA:g}, separated by commas."
        )
    return listed


def within(
    least: float, most: float = math.inf, kind: type[int] | type[float] = float
) -> Callable[[str], float]:
    """The type of an option whose number is bounded on both sides."""

    def number(text: str) -> float:
        value = kind(text)  # argparse words the ValueError
        if not (least <= value <= most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(
                f"{text!r}: give a number of at least {least:g}, at most {most:g}."
            )
        return value

    return number


def options() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--replicas", type=replica_counts, default="1024", help="8,64, or one number: all powers of 2 to it")
    add("--sigma", type=variations, default="0,0.5,1", help="spread σ: a latency is the median times exp(σZ)")
    add("--samples", type=within(10, 1e6, int), default=2000, help="synchronisations to simulate")
    add("--seed", type=within(0, kind=int), default=0)
    add("--latency-ms", type=within(0.001), default=50.0, help="median one-way latency")
    add("--bandwidth", type=within(0), default=0.0, help="of each link in Mbit/s; 0: no limit")
    add(
        "--state-bytes",
        type=within(0, kind=int),
        default=0,
        help="that a replica sends; noloco manifest check",
    )
    add("-k", "--steps", type=within(1, kind=int), default=50, help="inner steps per round")
    add("--step-ms", type=within(0.001), default=1000.0, help="mean compute time of an inner step")
    add("--step-variation", type=within(0, 3), default=0.3, help="its relative standard deviation")
    add("--plot", type=Path, help="draw both tables to this .svg, .png or .pdf file")
    return parser


def main() -> None:
    arguments = arguments_of(options(), replicas="8", samples=10)
    if bool(arguments.bandwidth) != bool(arguments.state_bytes):
        raise UserError("Give --bandwidth and --state-bytes together: both are needed for the bytes' time.")
    seconds = arguments.state_bytes * 8 / (arguments.bandwidth * 1e6) if arguments.bandwidth else 0.0
    latency = arguments.latency_ms / 1000
    conditions = Conditions(
        latency=latency,
        transfer=seconds / latency,
        inner_steps=arguments.steps,
        step=arguments.step_ms / 1000,
        variation=arguments.step_variation,
        samples=arguments.samples,
    )
    report = Report("latency", arguments.json)
    points = simulated(arguments.replicas, arguments.sigma, conditions, arguments.seed)
    if arguments.plot is not None:
        plot_latency(points, arguments.plot)
    console = Console(stderr=arguments.json)
    console.print(sync_table(points, conditions), "", idle_table(points, conditions), "", sep="\n")
    report.tell("\n".join([*explanation(points, conditions), ""]))
    results = [point.as_json() | {"conditions": asdict(conditions)} for point in points]
    report.conclude(ratios_of(points), results)


if __name__ == "__main__":
    run(main, UserError)
