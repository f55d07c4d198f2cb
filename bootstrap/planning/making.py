"""What `noloco plan` does: the scenario, the search with a bar, tables and picture, and for the owner a signature."""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bootstrap.placement.dtfm import DtfmProblem
from bootstrap.placement.noloco import NolocoProblem, Training
from bootstrap.placement.plan import Placement, make_plan, problem_of
from bootstrap.placement.plan_report import compared, comparison, sentences, stage_table
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
from bootstrap.planning.plan_options import PlanRequest
from node.command import run_async

RANDOM = 20  # placements, whose median cost a plan is told beside


def make_and_show(request: PlanRequest) -> None:
    """Raises `NolocoError` with what to do."""
    if request.join:
        _plan_swarm(request, run_async(look_at(request.join)))
        return
    assert request.scenario is not None
    known = read_scenario(request.scenario)
    training = Training(request.microbatches or 64, request.in_flight, request.k or 50, request.uniform)
    problem = problem_of(known, request.objective, request.stages or 8, request.replicas, training)
    _show(request, known, problem, searched(problem, request.searches, budget_of(request)))


def budget_of(request: PlanRequest) -> Budget:
    if request.evaluations is None:
        return Budget(seconds=request.seconds)
    return Budget(evaluations=request.evaluations)


def _plan_swarm(request: PlanRequest, swarm: LiveSwarm) -> None:
    """Raises `ScenarioError` when too little was measured, `StateError` when the key cannot be used."""
    known, manifest = swarm.scenario(), swarm.manifest
    training = Training(
        manifest.inner.microbatches, request.in_flight, manifest.outer.inner_steps, request.uniform
    )
    problem = problem_of(known, request.objective, manifest.stages, request.replicas, training)
    plans = searched(problem, request.searches, budget_of(request))
    moves = moves_of(swarm, problem, min(plans, key=lambda plan: plan.cost))
    sealed = None
    if request.publish is not None:
        sealed = signed_plan(swarm, moves, request.publish, request.hours * 3600)
    _show(request, known, problem, plans, moves)
    if sealed is not None:
        run_async(publish_plan(request.join or [], swarm, sealed, request.hours * 3600))
        print(f"The plan is signed and published; nodes follow it for {request.hours:g} h.", file=sys.stderr)


def _show(
    request: PlanRequest,
    known: Scenario,
    problem: DtfmProblem | NolocoProblem,
    plans: list[Placement],
    moves: Moves | None = None,
) -> None:
    best = min(plans, key=lambda plan: plan.cost)
    if request.picture is not None:
        # matplotlib: only who draws waits for it
        from bootstrap.placement.plan_plot import plot_plan

        plot_plan(best, known, plans, request.picture)
    if request.as_json:
        more: dict[str, Any] = {"compared": compared(plans)} if request.compare else {}
        more |= moves.as_json() if moves is not None else {}
        print(json.dumps({**best.as_json(), "scenario": known.name, **more}))
        return
    console = Console()
    if request.compare:
        console.print(comparison(plans), "", sep="\n")
    console.print(stage_table(best, known, request.mixing, problem), "", sep="\n")
    random = typical(problem, request.seed)
    console.print("\n".join(sentences(best, known, random, request.mixing)), highlight=False, markup=False)
    if moves is not None:
        console.print("", moves_table(moves), sep="\n")
        console.print(moves.sentence(), highlight=False, markup=False)


def searched(
    problem: DtfmProblem | NolocoProblem, wanted: list[tuple[str, int]], budget: Budget
) -> list[Placement]:
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
                sighting: Improvement, number: int = number, method: str = method, seed: int = seed
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
