"""The searches: budgets that hold, seeds that repeat, and plans as good as they are said to be."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from statistics import median

import numpy as np
import pytest

from bootstrap.lab.placement import METHOD_NAMES
from bootstrap.lab.placement.chains import improve
from bootstrap.lab.placement.dtfm import DtfmProblem, dtfm_problem
from bootstrap.lab.placement.methods import (
    METHODS,
    anneal,
    genetic,
    in_best_order,
    lifted,
    near_neighbours,
    repair,
)
from bootstrap.lab.placement.noloco import Training, noloco_problem
from bootstrap.lab.placement.plan import make_plan, problem_of
from bootstrap.lab.placement.search import Budget, Found, Improvement, run_search
from protocol.errors import ScenarioError
from tests.placement_cases import GIVEN, given_scenario, perturbed, random_scenario, scattered

PUBLISHED = {"case3_multidc": 16.087, "case4_regional": 34.802, "case5_worldwide": 49.218}


def given_problem(name: str) -> DtfmProblem:
    return dtfm_problem(given_scenario(name), 8, 8)


# --- how good -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GIVEN)
def test_the_genetic_algorithm_reaches_the_published_medians(name: str) -> None:
    problem = given_problem(name)
    costs = [run_search(problem, genetic, Budget(evaluations=1000), seed).cost for seed in range(3)]
    assert median(costs) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", GIVEN)
def test_annealing_is_no_worse_than_the_published_medians(name: str) -> None:
    problem = given_problem(name)
    costs = [run_search(problem, anneal, Budget(evaluations=10_000), seed).cost for seed in range(2)]
    assert max(costs) <= PUBLISHED[name] + 0.0005


@pytest.mark.long
@pytest.mark.parametrize("name", GIVEN)
def test_on_irregular_links_annealing_is_clearly_better(name: str) -> None:
    problem = dtfm_problem(perturbed(given_scenario(name), 7), 8, 8)
    published = run_search(problem, genetic, Budget(evaluations=2000), 0).cost
    costs = [run_search(problem, anneal, Budget(evaluations=20_000), seed).cost for seed in range(3)]
    assert median(costs) < 0.98 * published


def test_stages_come_into_the_order_of_their_regions() -> None:
    """Six stages on a line, a region each, in a wrong order: only the order is mended, and no order is better."""
    scenario = random_scenario(12, 1)
    place = np.repeat(np.arange(6), 2)
    bandwidth = np.where(np.eye(12, dtype=bool), np.inf, 1e9)
    scenario = replace(scenario, latency=0.1 * np.abs(place[:, None] - place[None, :]), bandwidth=bandwidth)
    problem = noloco_problem(scenario, 6, Training())
    for seed in range(4):
        wrong = np.random.default_rng(seed).permutation(6)[place]
        mended = in_best_order(problem, Found(wrong, problem.cost(wrong)))
        assert mended.cost == pytest.approx(problem.cost(mended.stage_of))
        assert mended.cost <= problem.cost(wrong)
        regions = [int(place[mended.stage_of == stage][0]) for stage in range(6)]
        steps = [abs(one - other) for one, other in pairwise(regions)]
        assert sum(steps) <= 6, (
            "neighbours on the line are neighbours in the pipeline, but for one step at most"
        )


def test_machines_of_several_gpus_among_single_ones() -> None:
    problem = dtfm_problem(scattered(32, 1), 4, 8)
    published = min(run_search(problem, genetic, Budget(evaluations=1500), seed).cost for seed in range(2))
    assert run_search(problem, anneal, Budget(evaluations=20_000), 0).cost <= published * 1.0001


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_all_placements_is_found_when_there_are_few(seed: int) -> None:
    """Eight devices in four stages of two: 2,520 placements, all of which random search sees."""
    problem = dtfm_problem(random_scenario(8, seed), 4, 2)
    everything = run_search(problem, METHODS["random"], Budget(evaluations=20_000), 0)
    assert run_search(problem, anneal, Budget(evaluations=4000), 0).cost == pytest.approx(everything.cost)


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dtfm", "noloco"])
def test_256_devices_get_a_plan_better_than_the_greedy_one(objective: str) -> None:
    problem = problem_of(scattered(256, 0), objective, 8, None, Training())
    greedy = run_search(problem, METHODS["greedy"], Budget(evaluations=60), 0)
    assert run_search(problem, anneal, Budget(evaluations=1500), 0).cost < greedy.cost


# --- how they run -------------------------------------------------------------------------------


def test_every_search_has_the_name_that_help_tells() -> None:
    assert tuple(METHODS) == METHOD_NAMES


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("objective", ["dtfm", "noloco"])
def test_every_method_keeps_its_budget_and_its_seed(method: str, objective: str) -> None:
    problem = problem_of(random_scenario(12, 3), objective, 3, 4, Training())
    plans = [make_plan(problem, method, Budget(evaluations=400), seed) for seed in (5, 5, 6)]
    assert [plan.outcome.evaluations for plan in plans] == [400] * 3
    assert plans[0].stages == plans[1].stages
    assert plans[0].outcome.history[-1].cost == plans[0].cost
    for plan in plans:
        assert sorted(device for stage in plan.stages for device in stage) == list(range(12))
        assert {len(stage) for stage in plan.stages} == {4}
        assert plan.cost == pytest.approx(problem.cost(plan.outcome.stage_of))


@pytest.mark.parametrize("method", METHODS)
def test_time_ends_a_search_and_it_can_be_watched(method: str) -> None:
    """Each look at this clock takes a hundredth of a second."""
    ticks = count()
    seen: list[Improvement] = []
    problem = dtfm_problem(random_scenario(12, 3), 3, 4)
    outcome = run_search(
        problem,
        METHODS[method],
        Budget(seconds=8.0),
        0,
        progress=seen.append,
        clock=lambda: next(ticks) / 100,
    )
    assert 8.0 <= outcome.seconds < 8.5
    costs = [sighting.cost for sighting in seen]
    assert costs == sorted(costs, reverse=True)
    assert all(after.evaluations > before.evaluations for before, after in pairwise(seen))
    assert [sighting.cost for sighting in outcome.history] == sorted(set(costs), reverse=True)


def test_ctrl_c_leaves_the_best_so_far() -> None:
    def interrupt(sighting: Improvement) -> None:
        if sighting.evaluations >= 50:
            raise KeyboardInterrupt

    problem = dtfm_problem(random_scenario(12, 3), 3, 4)
    outcome = run_search(problem, METHODS["random"], Budget(seconds=1e6), 0, progress=interrupt)
    assert outcome.evaluations == 50
    assert problem.cost(outcome.stage_of) == pytest.approx(outcome.cost)


def test_one_evaluation_is_a_plan() -> None:
    problem = dtfm_problem(random_scenario(12, 3), 3, 4)
    for method in METHODS.values():
        assert run_search(problem, method, Budget(evaluations=1), 0).evaluations == 1


@pytest.mark.parametrize(("stages", "replicas"), [(1, 4), (4, 1), (2, 1)])
@pytest.mark.parametrize("objective", ["dtfm", "noloco"])
@pytest.mark.parametrize("method", METHODS)
def test_the_smallest_pipelines_are_planned_too(
    stages: int, replicas: int, objective: str, method: str
) -> None:
    problem = problem_of(random_scenario(stages * replicas, 1), objective, stages, replicas, Training())
    plan = make_plan(problem, method, Budget(evaluations=150), 0)
    assert [len(stage) for stage in plan.stages] == [replicas] * stages


def test_unknown_names_are_told() -> None:
    problem = dtfm_problem(random_scenario(12, 3), 3, 4)
    with pytest.raises(ScenarioError, match="--method 'magic'"):
        make_plan(problem, "magic", Budget(evaluations=1), 0)
    with pytest.raises(ScenarioError, match="--objective 'joy'"):
        problem_of(random_scenario(12, 3), "joy", 3, 4, Training())


# --- their parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("wasted_links", [True, False])
def test_chains_keep_sizes_and_never_lose(wasted_links: bool) -> None:
    for seed in range(20):
        problem = dtfm_problem(random_scenario(24, seed), 4, 6)
        stage_of = problem.drawn(np.random.default_rng(seed))
        before = inside(problem, stage_of)
        gain = improve(problem.weights, stage_of, 4, wasted_links)
        assert np.bincount(stage_of).tolist() == [6] * 4
        assert gain >= 0
        if not wasted_links and gain > 0:  # Kernighan and Lin's gain is what the links inside groups lose
            assert inside(problem, stage_of) < before


def inside(problem: DtfmProblem, stage_of: np.ndarray) -> float:
    return float(problem.weights[stage_of[:, None] == stage_of[None, :]].sum())


def test_sizes_are_repaired() -> None:
    stage_of = np.array([0, 0, 0, 0, 1, 2])
    repair(stage_of, np.array([2, 2, 2]), np.random.default_rng(0))
    assert np.bincount(stage_of).tolist() == [2, 2, 2]
    assert stage_of[4:].tolist() == [1, 2]


def test_greedy_fills_a_stage_with_neighbours() -> None:
    problem = given_problem("case5_worldwide")
    stage_of = near_neighbours(problem, np.full(8, 8), np.random.default_rng(0))
    assert all(len(set(stage_of[8 * region : 8 * region + 8])) == 1 for region in range(8))


def test_clusters_are_near_devices_and_cost_what_their_members_do() -> None:
    """256 devices alike in fours are found as clusters, and a placement of those costs the same once lifted."""
    small = random_scenario(64, 4)
    index = np.arange(256) // 4
    latency, bandwidth = small.latency[index][:, index], small.bandwidth[index][:, index]
    many = replace(small, latency=latency, bandwidth=bandwidth)
    problem = dtfm_problem(many, 8, 32)
    made = problem.coarse(np.random.default_rng(0))
    assert made is not None
    among, members = made
    assert len({tuple(index[row]) for row in members}) == 64
    assert all(len(set(index[row])) == 1 for row in members)
    placement = among.drawn(np.random.default_rng(1))
    assert among.cost(placement) == pytest.approx(problem.cost(lifted(placement, members)))
