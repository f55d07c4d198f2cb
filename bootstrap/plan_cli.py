"""`noloco plan`: which device takes which stage, from measured links."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bootstrap.placement.dtfm import DtfmProblem
from bootstrap.placement.methods import DEFAULT, METHODS
from bootstrap.placement.noloco import NolocoProblem, Training
from bootstrap.placement.plan import Plan, make_plan, problem_of
from bootstrap.placement.plan_report import compared, comparison, sentences, stage_table
from bootstrap.placement.scenario import read_scenario
from bootstrap.placement.search import Budget, Sighting
from node.command import fail
from protocol.errors import NolocoError, UserError

RANDOM = 20  # placements, whose median cost a plan is told beside


def plan(
    scenario: Annotated[
        Path, typer.Option(help="Measured links, as JSON; docs/placement.md has the format.")
    ],
    stages: Annotated[int, typer.Option(min=1, max=1024, help="Pipeline stages.")] = 8,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Of each stage; for noloco sizes are free, and this is not used."),
    ] = None,
    objective: Annotated[str, typer.Option(help="noloco or dtfm: whose cost is to be least.")] = "noloco",
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = DEFAULT,
    seconds: Annotated[float, typer.Option(min=0.01, help="To search for.")] = 20.0,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="Search for this many instead: the same plan each time.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    uniform: Annotated[
        float, typer.Option(min=0, max=1, help="noloco: least share of traffic routed at random.")
    ] = 1.0,
    mixing: Annotated[
        float, typer.Option(min=0, max=1, help="noloco: least 1 − λ₂ of a pairing with nearer partners.")
    ] = 0.5,
    microbatches: Annotated[int, typer.Option(min=1, help="noloco: of a replica's inner step.")] = 64,
    in_flight: Annotated[int, typer.Option(min=1, help="noloco: microbatches of a replica on the way.")] = 16,
    k: Annotated[int, typer.Option("-k", min=1, help="noloco: inner steps of a round.")] = 50,
    compare: Annotated[
        bool, typer.Option(help="Run every method over --seeds, each with the budget.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="For --compare.")] = 3,
    picture: Annotated[Path | None, typer.Option(help="Draw plan and search, as .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")] = False,
) -> None:
    """Place devices in pipeline stages so that training waits least for the network."""
    console = Console()
    try:
        if not (math.isfinite(seconds) and math.isfinite(uniform) and math.isfinite(mixing)):
            raise UserError("--seconds, --uniform and --mixing: give finite numbers.")
        if picture is not None and picture.suffix not in (".svg", ".png", ".pdf"):
            raise UserError(f"Cannot draw {picture}: end its name in .svg, .png or .pdf.")
        known = read_scenario(scenario)
        training = Training(microbatches, in_flight, k, uniform)
        problem = problem_of(known, objective, stages, replicas, training)
        budget = Budget(evaluations=evaluations) if evaluations is not None else Budget(seconds=seconds)
        wanted = [(name, seed + s) for name in METHODS for s in range(seeds)] if compare else [(method, seed)]
        plans = searched(problem, wanted, budget)
        best = min(plans, key=lambda plan: plan.cost)
        if picture is not None:
            # matplotlib: only who draws waits for it
            from bootstrap.placement.plan_plot import plot_plan

            plot_plan(best, known, plans, picture)
    except NolocoError as error:
        fail(error)
    if as_json:
        more = {"compared": compared(plans)} if compare else {}
        print(json.dumps({**best.as_json(), "scenario": known.name, **more}))
        return
    if compare:
        console.print(comparison(plans), "", sep="\n")
    console.print(stage_table(best, known, mixing, problem), "", sep="\n")
    random = typical(problem, seed)
    console.print("\n".join(sentences(best, known, random, mixing)), highlight=False, markup=False)


def searched(
    problem: DtfmProblem | NolocoProblem, wanted: list[tuple[str, int]], budget: Budget
) -> list[Plan]:
    """A plan for each method and seed, with a bar on a terminal."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[cost]}"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    plans = []
    with bar:
        task = bar.add_task("compiling", total=len(wanted), cost="")
        for number, (method, seed) in enumerate(wanted):

            def show(
                sighting: Sighting, number: int = number, method: str = method, seed: int = seed
            ) -> None:
                bar.update(
                    task, description=f"{method}, seed {seed}", cost=f"{sighting.cost:.3f} s",
                    completed=number + min(1.0, sighting.spent),
                )  # fmt: skip

            plans.append(make_plan(problem, method, budget, seed, progress=show))
    return plans


def typical(problem: DtfmProblem | NolocoProblem, seed: int) -> float:
    """Median cost of random placements, in seconds."""
    generator = np.random.default_rng(seed)
    return median(problem.cost(problem.drawn(generator)) for _ in range(RANDOM))
