"""What the planner's placement is worth: the daemon's swarm in simulation, on the scenario's links.

64 nodes of the daemon's own code in 8 stages over the in-memory network, with the scenario's latencies and bandwidths
and the sizes of GPT3-1.3B; activations go to random peers of the next stage. Placed by `noloco plan` for NoLoCo's
objective, and at random. Ratio `planned_vs_random`: tokens per simulated second, the plan's by the median of the
random placements'.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from placements.trial import Trial, tokens_per_second
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.placement import DEFAULT_METHOD
from bootstrap.lab.placement.noloco import Training
from bootstrap.lab.placement.plan import make_plan, problem_of
from bootstrap.lab.placement.scenario import read_scenario
from bootstrap.lab.placement.search import Budget
from protocol.errors import ScenarioError

SCENARIOS = Path(__file__).parent.parent / "tests" / "data" / "scenarios"


def stages_of(stages: tuple[tuple[int, ...], ...], devices: int) -> list[int]:
    stage_of = np.full(devices, -1)
    for stage, members in enumerate(stages):
        stage_of[list(members)] = stage
    return [int(stage) for stage in stage_of]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scenario", type=Path, nargs="+", default=[SCENARIOS / "case5_worldwide.json"])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of planning")
    parser.add_argument("--random", type=int, default=3, help="random placements to compare with")
    parser.add_argument("--repeats", type=int, default=1, help="swarms with other seeds for each placement")
    parser.add_argument("--microbatches", type=int, default=Trial.microbatches, help="of a step of a replica")
    arguments = arguments_of(parser, seconds=1.0, random=1, microbatches=2)
    logging.getLogger().setLevel(logging.ERROR)  # what volunteers are told, by all nodes at once
    logging.getLogger("noloco").setLevel(logging.ERROR)
    report, results = Report("placed_swarm", arguments.json), []
    for path in arguments.scenario:
        scenario = read_scenario(path)
        trial = Trial(microbatches=arguments.microbatches)
        per_step = scenario.pipeline_bytes / trial.microbatch_bytes
        training = Training(microbatches=per_step)
        problem = problem_of(scenario, "noloco", arguments.stages, None, training)
        plans: list[tuple[str, list[int], float]] = []
        for method, seeds in (("default", 1), ("random", arguments.random)):
            for seed in range(seeds):
                budget = Budget(seconds=arguments.seconds) if method == "default" else Budget(evaluations=1)
                name = DEFAULT_METHOD if method == "default" else "random"
                plan = make_plan(problem, name, budget, seed)
                plans.append((name, stages_of(plan.stages, scenario.devices), plan.cost))
        for name, stage_of, cost in plans:
            speeds = [
                tokens_per_second(scenario, stage_of, replace(trial, seed=seed))
                for seed in range(arguments.repeats)
            ]
            row: dict[str, Any] = {
                "scenario": path.stem,
                "placement": name,
                "tokens_per_second": round(median(speeds), 2),
                "planned_step_seconds": round(cost, 2),
            }
            report.tell_row(row)
            results.append(row)
    ratios = {}
    for path in arguments.scenario:
        rates = {
            name: median(
                row["tokens_per_second"]
                for row in results
                if row["scenario"] == path.stem and (row["placement"] == "random") == (name == "random")
            )
            for name in ("planned", "random")
        }
        ratios[f"planned_vs_random_{path.stem}"] = round(rates["planned"] / rates["random"], 3)
    report.conclude(ratios, results, f"median of {arguments.random} random placements")


if __name__ == "__main__":
    run(main, ScenarioError)
