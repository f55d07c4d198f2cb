"""Placement: the default search against DT-FM's genetic algorithm with ten times the time, and DT-FM's experiment.

Prints `annealing_to_genetic`: the median cost of the default search over that of DT-FM's algorithm given ten times as
long, on each scenario of tests/data and on copies in which every link got a factor of its own from [0.8, 1.25]. At
most 1 is the aim. Time is the processor time of the process that searches, so that a busy machine does not decide.
With ten seeds and 20 s that is 37 minutes of a core for each scenario and copy: `--keep FILE` goes on where it ended.

Then the default search for NoLoCo's step time with thousands of devices in 16 regions (`placements.regions`), over
what comes of planning each region by itself with its share of the same time: `plan_to_by_hand`.

Then DT-FM's experiment in simulation (`placements.batch_time`): PFLOPS of GPT3-1.3B's width with 24, 32 and
40 layers and 1024, 2048 and 4096 sequences, scheduled and in random order, beside the ratios of the paper's table.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from placements.batch_time import Batch, batch_seconds
from placements.regions import by_hand, regional, uneven
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.placement import DEFAULT_METHOD
from bootstrap.lab.placement.dtfm import dtfm_problem
from bootstrap.lab.placement.methods import METHODS
from bootstrap.lab.placement.noloco import Training, noloco_problem
from bootstrap.lab.placement.plan import WARM_UP
from bootstrap.lab.placement.scenario import Scenario, read_scenario, scenario_from
from bootstrap.lab.placement.search import Budget, run_search
from bootstrap.lab.simulation.study import as_they_end
from protocol.errors import DataError

SCENARIOS = Path(__file__).parent.parent / "tests" / "data" / "scenarios"
NAMES = ("case3_multidc", "case4_regional", "case5_worldwide")
STAGES, REPLICAS = 8, 8
LONGER = 10  # times the seconds for DT-FM's algorithm
# arXiv 2206.01288: PFLOPS with and without scheduler, mean of nine settings; two sites, regional, world-wide
PAPER = {"case3_multidc": (1.63, 1.18), "case4_regional": (1.34, 1.03), "case5_worldwide": (0.86, 0.36)}
RANDOM_ORDERS = 5


def perturbed(scenario: Scenario, seed: int) -> Scenario:
    """Every link times a factor of its own from [0.8, 1.25]; the scenario itself for seed 0."""
    if seed == 0:
        return scenario
    generator = np.random.default_rng(seed)
    factors = []
    for _ in range(2):
        upper = np.triu(generator.uniform(0.8, 1.25, scenario.latency.shape), 1)
        factors.append(upper + upper.T + np.eye(scenario.devices))
    return replace(scenario, latency=scenario.latency * factors[0], bandwidth=scenario.bandwidth * factors[1])


@dataclass(frozen=True)
class Search:
    """One run of one method."""

    scenario: str
    perturbation: int
    method: str
    seconds: float
    seed: int

    def cost(self) -> float:
        """Of its best placement, after that much of this process's time."""
        problem = dtfm_problem(
            perturbed(read_scenario(SCENARIOS / f"{self.scenario}.json"), self.perturbation), STAGES, REPLICAS
        )
        method = METHODS[self.method]
        run_search(problem, method, Budget(evaluations=WARM_UP), 0)
        budget = Budget(seconds=self.seconds)
        return run_search(problem, method, budget, self.seed, clock=time.process_time).cost


def with_cost(search: Search) -> tuple[Search, float]:
    return search, search.cost()


def kept(path: Path | None) -> dict[Search, float]:
    """What an earlier run wrote to the file. Raises `DataError` for anything else."""
    if path is None or not path.exists():
        return {}
    costs = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            cost = float(row.pop("cost"))
            costs[Search(**row)] = cost
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                f"{path}, line {number}, is not a search of this benchmark. Name another file, or remove that line."
            ) from None
    return costs


def costs_of(searches: list[Search], keep: Path | None, workers: int, report: Report) -> dict[Search, float]:
    """The cost of each; those that `keep` does not hold are run and added to it as they end."""
    costs = kept(keep)
    missing = [search for search in searches if search not in costs]
    for search, cost in as_they_end(with_cost, missing, workers):
        costs[search] = cost
        if keep:
            with keep.open("a", encoding="utf-8") as lines:
                print(json.dumps(asdict(search) | {"cost": cost}), file=lines)
        report.tell_row(asdict(search) | {"cost": round(cost, 3)})
    return costs


def search_results(arguments: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """The medians of each scenario and of each of its copies."""
    methods = ((DEFAULT_METHOD, arguments.seconds), ("genetic", LONGER * arguments.seconds))
    places = [(name, copy) for copy in range(arguments.copies + 1) for name in NAMES]
    searches = {
        (name, copy, method): [Search(name, copy, method, seconds, seed) for seed in range(arguments.seeds)]
        for name, copy in places
        for method, seconds in methods
    }
    costs = costs_of(
        [s for group in searches.values() for s in group], arguments.keep, arguments.workers, report
    )
    results = []
    for name, copy in places:
        ours, theirs = (
            median(costs[search] for search in searches[name, copy, method]) for method, _ in methods
        )
        result = {
            "scenario": name, "perturbation": copy, "seconds": arguments.seconds, "seeds": arguments.seeds,
            "default": ours, "genetic": theirs, "ratio": ours / theirs,
        }  # fmt: skip
        report.tell(f"{name} perturbation {copy}: {ours:.3f} / {theirs:.3f} s = {ours / theirs:.4f}")
        results.append(result)
    return results


def experiment_results(evaluations: int, report: Report) -> list[dict[str, Any]]:
    """PFLOPS of each scenario, scheduled and in random order, with and without overlap."""
    results = []
    for name, overlap in product(NAMES, (True, False)):
        scenario = read_scenario(SCENARIOS / f"{name}.json")
        problem = dtfm_problem(scenario, STAGES, REPLICAS)
        found = run_search(problem, METHODS[DEFAULT_METHOD], Budget(evaluations=evaluations), 0)
        planned = problem.explain(found.stage_of).stages
        generator = np.random.default_rng(0)
        orders = [
            generator.permutation(scenario.devices).reshape(STAGES, REPLICAS) for _ in range(RANDOM_ORDERS)
        ]
        batches = [Batch(layers=n, sequences=m) for n, m in product((24, 32, 40), (1024, 2048, 4096))]
        scheduled = [b.work() / batch_seconds(scenario, planned, b, overlap) / 1e15 for b in batches]
        shuffled = [
            mean(b.work() / batch_seconds(scenario, rows.tolist(), b, overlap) for rows in orders) / 1e15
            for b in batches
        ]
        result = {
            "scenario": name, "overlap": overlap, "scheduled": mean(scheduled), "random": mean(shuffled),
            "ratio": mean(scheduled) / mean(shuffled), "paper": PAPER[name],
            "paper_ratio": PAPER[name][0] / PAPER[name][1],
        }  # fmt: skip
        report.tell(
            f"{name} {'with' if overlap else 'without'} overlap: {result['scheduled']:.2f} / {result['random']:.2f} "
            f"PFLOPS = {result['ratio']:.2f}; in the paper {PAPER[name]}: {result['paper_ratio']:.2f}"
        )
        results.append(result)
    return results


def regional_results(counts: list[int], seconds: float, report: Report) -> list[dict[str, Any]]:
    """One search for each number of devices; up to 1,024 each link is uneven, above clusters are planned."""
    results, training = [], Training()
    for count in counts:
        scenario = scenario_from(regional(count, seed=0))
        scenario = scenario if scenario.members else uneven(scenario, seed=0)
        problem = noloco_problem(scenario, STAGES, training)
        run_search(problem, METHODS[DEFAULT_METHOD], Budget(evaluations=WARM_UP), 0)
        budget = Budget(seconds=seconds)
        cost = run_search(problem, METHODS[DEFAULT_METHOD], budget, 0, clock=time.process_time).cost
        hand = problem.cost(by_hand(scenario, STAGES, training, seconds, 0))
        generator = np.random.default_rng(0)
        random = median(problem.cost(problem.drawn(generator)) for _ in range(RANDOM_ORDERS))
        result = {
            "devices": count, "seconds": seconds, "default": cost, "by_hand": hand, "random": random,
            "ratio": cost / hand,
        }  # fmt: skip
        report.tell_row({key: round(value, 3) for key, value in result.items()})
        results.append(result)
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for the default search; ten times for DT-FM's"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1, help="perturbed copies of each scenario")
    parser.add_argument(
        "--evaluations", type=int, default=10_000, help="of placements, for DT-FM's experiment"
    )
    parser.add_argument(
        "--regional", type=int, nargs="*", default=[1000, 10_000], help="devices in 16 regions"
    )
    parser.add_argument("--regional-seconds", type=float, default=30.0, help="of search for these")
    parser.add_argument("--workers", type=int, default=1, help="processes that search")
    parser.add_argument(
        "--keep",
        type=Path,
        help="JSON lines: each search's cost as it ends; those found there are not run again",
    )
    arguments = arguments_of(
        parser, seconds=0.1, seeds=1, copies=0, evaluations=300, regional=[320], regional_seconds=1.0
    )
    report = Report("placement", arguments.json)
    experiment = experiment_results(arguments.evaluations, report)
    thousands = regional_results(arguments.regional, arguments.regional_seconds, report)
    searches = search_results(arguments, report)
    ratios = {
        f"annealing_to_genetic_{r['scenario']}_{r['perturbation']}": round(r["ratio"], 4) for r in searches
    }
    ratios["annealing_to_genetic_worst"] = max(ratios.values())
    ratios |= {
        f"scheduled_to_random_{r['scenario']}": round(r["ratio"], 3) for r in experiment if r["overlap"]
    }
    ratios |= {f"plan_to_by_hand_{r['devices']}": round(r["ratio"], 3) for r in thousands}
    ratios["plan_to_by_hand_worst"] = max((round(r["ratio"], 3) for r in thousands), default=1.0)
    report.conclude(ratios, searches + experiment + thousands)


if __name__ == "__main__":
    run(main, DataError)
