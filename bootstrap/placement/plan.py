"""From a scenario to a plan: the problem of an objective, a search with the budget given, the stages in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bootstrap.placement import dtfm, noloco
from bootstrap.placement.dtfm import DtfmProblem, dtfm_problem
from bootstrap.placement.methods import METHODS
from bootstrap.placement.noloco import NolocoProblem, Training, noloco_problem
from bootstrap.placement.scenario import Scenario
from bootstrap.placement.search import Budget, Improvement, SearchResult, run_search
from protocol.errors import ScenarioError

OBJECTIVES = ("noloco", "dtfm")
WARM_UP = 101  # evaluations: every loop of every method has run once, and is compiled


@dataclass(frozen=True)
class Placement:
    """`stages` [S][…] devices in the order of the pipeline. For DT-FM a column is one pipeline."""

    method: str
    objective: str
    seed: int
    outcome: SearchResult
    stages: tuple[tuple[int, ...], ...]
    terms: dtfm.DtfmCost | noloco.Terms

    @property
    def cost(self) -> float:
        return self.outcome.cost

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "objective": self.objective,
            "seed": self.seed,
            "cost": self.cost,
            "seconds": round(self.outcome.seconds, 3),
            "evaluations": self.outcome.evaluations,
            "stages": [list(stage) for stage in self.stages],
            "terms": terms_as_json(self.terms),
        }


def problem_of(
    scenario: Scenario, objective: str, stages: int, replicas: int | None, training: Training
) -> DtfmProblem | NolocoProblem:
    """Raises `ScenarioError` when the scenario's devices cannot fill the stages, or the objective is unknown."""
    if objective == "noloco":
        return noloco_problem(scenario, stages, training)
    if objective == "dtfm":
        return dtfm_problem(scenario, stages, replicas or max(1, scenario.devices // stages))
    raise ScenarioError(f"--objective {objective!r}: choose from {', '.join(OBJECTIVES)}.")


def make_plan(
    problem: DtfmProblem | NolocoProblem,
    method: str,
    budget: Budget,
    seed: int,
    *,
    progress: Callable[[Improvement], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Placement:
    """Raises `ScenarioError` for an unknown method. The budget does not count the compiling before."""
    if method not in METHODS:
        raise ScenarioError(f"--method {method!r}: choose from {', '.join(METHODS)}.")
    run_search(problem, METHODS[method], Budget(evaluations=WARM_UP), seed, clock=clock)
    outcome = run_search(problem, METHODS[method], budget, seed, progress=progress, clock=clock)
    if isinstance(problem, DtfmProblem):
        cost = dtfm.explain(problem, outcome.stage_of)
        return Placement(method, "dtfm", seed, outcome, cost.pipelines, cost)
    members = tuple(
        tuple(np.flatnonzero(outcome.stage_of == stage).tolist()) for stage in range(problem.stages)
    )
    return Placement(method, "noloco", seed, outcome, members, noloco.explain(problem, outcome.stage_of))


def terms_as_json(terms: dtfm.DtfmCost | noloco.Terms) -> dict[str, Any]:
    if isinstance(terms, dtfm.DtfmCost):
        return {"data_parallel": terms.parallel, "pipeline": terms.pipeline}
    return {
        "hops": list(terms.hops),
        "latency": terms.latency,
        "bottleneck": terms.bottleneck,
        "busiest": terms.busiest,
        "throughput": terms.throughput if np.isfinite(terms.throughput) else None,
        "gossip": list(terms.gossip),
    }
