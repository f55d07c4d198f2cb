"""What `noloco plan` does: the scenario, the search with a bar, tables and picture, and for the owner a signature."""

from __future__ import annotations

import json
import sys
from functools import partial
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bootstrap.placement.dtfm import DtfmProblem
from bootstrap.placement.noloco import NolocoProblem, Training
from bootstrap.placement.plan import Placement, make_plan, problem_of
from bootstrap.placement.plan_report import compared, comparison, plot_plan, sentences, stage_table
from bootstrap.placement.scenario import Scenario, read_scenario
from bootstrap.placement.search import Budget, Improvement
from bootstrap.planning.live_plan import (
    LiveSwarm,
    Moves,
    look_at,
    moves_of,
    moves_table,
    publish_plan,
    signed_plan,
)
from bootstrap.planning.plan_cli import PlanRequest
from node.command import run_async

RANDOM = 20  # placements, with whose median cost a plan is compared


def make_and_show(request: PlanRequest) -> None:
    """Raises `NolocoError` with what to do."""
    if request.join:
        _plan_swarm(request, run_async(look_at(request.join)))
        return
    assert request.scenario is not None
    known = read_scenario(request.scenario)
    training = Training(request.microbatches or 64, request.in_flight, request.k or 50, request.uniform)
    problem = problem_of(known, request.objective, request.stages or 8, request.replicas, training)
    _show(request, known, problem, searched(problem, request))


def _plan_swarm(request: PlanRequest, swarm: LiveSwarm) -> None:
    """Raises `ScenarioError` when too little was measured, `StateError` when the key cannot be used."""
    known, manifest = swarm.scenario(), swarm.manifest
    training = Training(
        manifest.inner.microbatches, request.in_flight, manifest.outer.inner_steps, request.uniform
    )
    problem = problem_of(known, request.objective, manifest.stages, request.replicas, training)
    plans = searched(problem, request)
    moves = moves_of(swarm, problem, min(plans, key=lambda plan: plan.cost))
    lifetime = request.hours * 3600
    sealed = signed_plan(swarm, moves, request.publish, lifetime) if request.publish is not None else None
    _show(request, known, problem, plans, moves)
    if sealed is not None:
        run_async(publish_plan(request.join or [], swarm, sealed, lifetime))
        print(f"The plan is signed and published; nodes follow it for {request.hours:g} h.", file=sys.stderr)


def searched(problem: DtfmProblem | NolocoProblem, request: PlanRequest) -> list[Placement]:
    """A plan for each method and seed, with a bar on a terminal."""
    budget = Budget(seconds=request.seconds)
    if request.evaluations is not None:
        budget = Budget(evaluations=request.evaluations)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[cost]}"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    plans = []
    with bar:
        task = bar.add_task("compiling", total=len(request.searches), cost="")
        for number, (method, seed) in enumerate(request.searches):
            progress = partial(_advance, bar, task, f"{method}, seed {seed}", number)
            plans.append(make_plan(problem, method, budget, seed, progress=progress))
    return plans


def _advance(bar: Progress, task: TaskID, search: str, finished: int, sighting: Improvement) -> None:
    completed = finished + min(1.0, sighting.spent)
    bar.update(task, description=search, cost=f"{sighting.cost:.3f} s", completed=completed)


def _show(
    request: PlanRequest,
    known: Scenario,
    problem: DtfmProblem | NolocoProblem,
    plans: list[Placement],
    moves: Moves | None = None,
) -> None:
    best = min(plans, key=lambda plan: plan.cost)
    if request.picture is not None:
        plot_plan(best, known, plans, request.picture)
    if request.as_json:
        contents = best.as_json() | {"scenario": known.name}
        if request.compare:
            contents["compared"] = compared(plans)
        print(json.dumps(contents | (moves.as_json() if moves is not None else {})))
        return
    console = Console()
    if request.compare:
        console.print(comparison(plans), "", sep="\n")
    console.print(stage_table(best, known, request.mixing, problem), "", sep="\n")
    generator = np.random.default_rng(request.seed)
    random = median(problem.cost(problem.drawn(generator)) for _ in range(RANDOM))
    console.print("\n".join(sentences(best, known, random, request.mixing)), highlight=False, markup=False)
    if moves is not None:
        console.print("", moves_table(moves), sep="\n")
        console.print(moves.sentence(), highlight=False, markup=False)
