"""The way from a scenario to a plan: an objective's problem, a search with the budget given, the stages in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bootstrap.lab.placement.dtfm import DtfmCost, dtfm_problem
from bootstrap.lab.placement.methods import METHODS
from bootstrap.lab.placement.noloco import Terms, Training, noloco_problem
from bootstrap.lab.placement.scenario import Scenario
from bootstrap.lab.placement.search import Budget, Improvement, Problem, SearchResult, run_search
from protocol.errors import ScenarioError

OBJECTIVES = ("noloco", "dtfm")
WARM_UP = 101  # evaluations: every loop of every method has run once, and is compiled


@dataclass(frozen=True)
class Placement:
    """The placement that one search found, and its cost term by term."""

    method: str
    seed: int
    outcome: SearchResult
    terms: DtfmCost | Terms

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """[S][…] devices in the order of the pipeline. For DT-FM a column is one pipeline."""
        return self.terms.stages

    @property
    def cost(self) -> float:
        return self.outcome.cost

    def as_json(self) -> dict[str, object]:
        return {
            "method": self.method,
            "objective": self.terms.objective,
            "seed": self.seed,
            "cost": self.cost,
            "seconds": round(self.outcome.seconds, 3),
            "evaluations": self.outcome.evaluations,
            "stages": [list(stage) for stage in self.stages],
            "terms": self.terms.as_json(),
        }


def problem_of(
    scenario: Scenario, objective: str, stages: int, replicas: int | None, training: Training
) -> Problem:
    """Make the objective's problem. Raises `ScenarioError` if it is unknown or the devices cannot fill the stages."""
    if objective == "noloco":
        return noloco_problem(scenario, stages, training)
    if objective == "dtfm":
        return dtfm_problem(scenario, stages, replicas or max(1, scenario.devices // stages))
    raise ScenarioError(f"--objective {objective!r}: choose from {', '.join(OBJECTIVES)}.")


def make_plan(
    problem: Problem,
    method: str,
    budget: Budget,
    seed: int,
    *,
    progress: Callable[[Improvement], None] | None = None,
) -> Placement:
    """Search by `method`; the budget leaves out the compiling before. Raises `ScenarioError` for an unknown one."""
    if method not in METHODS:
        raise ScenarioError(f"--method {method!r}: choose from {', '.join(METHODS)}.")
    run_search(problem, METHODS[method], Budget(evaluations=WARM_UP), seed)
    outcome = run_search(problem, METHODS[method], budget, seed, progress=progress)
    return Placement(method, seed, outcome, problem.explain(outcome.stage_of))
