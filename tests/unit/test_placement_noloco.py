"""NoLoCo's step time: against plain loops, against the specification's numbers, and its routing and pairing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from bootstrap.lab.placement.dtfm import path_order
from bootstrap.lab.placement.kernels import cheapest_flow
from bootstrap.lab.placement.methods import anneal
from bootstrap.lab.placement.noloco import NolocoProblem, Training, noloco_problem
from bootstrap.lab.placement.pairing import mean_exchange, nearest_pairs, pairing, spectral_gap, uniform_pairs
from bootstrap.lab.placement.scenario import Scenario
from bootstrap.lab.placement.search import Budget, run_search
from protocol.errors import ScenarioError
from tests.placement_cases import given_scenario, random_scenario


def uneven_scenario(count: int, seed: int) -> Scenario:
    """Devices of unequal speed at three sites, two of which share an uplink."""
    generator = np.random.default_rng(seed)
    return replace(
        random_scenario(count, seed),
        throughput=generator.uniform(1, 10, count),
        site=generator.integers(-1, 2, count),
        uplinks=generator.uniform(1e8, 1e9, 2),
    )


def cheapest(times: np.ndarray, supply: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """The cheapest flow by linear programming."""
    a, b = times.shape
    rows = np.kron(np.eye(a), np.ones(b))
    columns = np.kron(np.ones(a), np.eye(b))
    solved = linprog(
        times.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.r_[supply, demand], method="highs"
    )
    found: np.ndarray = solved.x.reshape(a, b)
    return found


def by_loops(scenario: Scenario, stages: list[list[int]], training: Training) -> dict[str, Any]:
    """Every term of the model, sum by sum, in the words of the specification."""
    count, tau = scenario.devices, scenario.throughput
    scale = count / len(stages)
    c_a, c_g = scenario.pipeline_bytes / training.microbatches, scenario.data_parallel_bytes
    speed = np.ones(count) if tau is None else tau
    q = {i: speed[i] / sum(speed[j] for j in group) for group in stages for i in group}

    def t(i: int, j: int, nbytes: float) -> float:
        return float(scenario.latency[i, j] + 8 * nbytes / scenario.bandwidth[i, j])

    hops, sent, received, crossing = [], [0.0] * count, [0.0] * count, [0.0, 0.0]
    for here, there in pairwise(stages):
        times = np.array([[t(i, j, c_a) for j in there] for i in here])
        flow = cheapest(times, np.array([q[i] for i in here]), np.array([q[j] for j in there]))
        hop = 0.0
        for a, i in enumerate(here):
            for b, j in enumerate(there):
                share = (1 - training.uniform) * flow[a, b] + training.uniform * q[i] * q[j]
                hop += share * t(i, j, c_a)
                seconds = share * 8 * c_a / scenario.bandwidth[i, j]
                sent[i] += seconds  # activations
                sent[j] += seconds  # gradients
                received[j] += seconds
                received[i] += seconds
                sites = set() if scenario.site is None else {int(scenario.site[i]), int(scenario.site[j])}
                for site in sites - {-1} if len(sites) == 2 else ():
                    crossing[site] += share * 8 * c_a / scenario.uplinks[site]  # type: ignore[index]
        hops.append(hop)
    compute = [sum(q[i] / tau[i] for i in g) if tau is not None else 0.0 for g in stages]
    busy = [q[i] / tau[i] for i in q] if tau is not None else []
    latency = sum(2 * h for h in hops) + sum(compute)
    z = max(busy + sent + received + crossing)
    gossip = [np.mean([t(i, j, c_g) for i in group for j in group if i != j]) for group in stages]
    in_flight, microbatches = training.in_flight * scale, training.microbatches * scale
    step = latency + (microbatches - 1) * max(z, latency / in_flight)
    step += max(gossip) / training.inner_steps
    return {
        "hops": hops,
        "L": latency,
        "Z": z,
        "X": min(1 / z if z else np.inf, in_flight / latency if latency else np.inf),
        "G": gossip,
        "T": step,
    }


@pytest.mark.parametrize("seed", range(30))
def test_plain_loops_find_the_same(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count, stages = int(generator.integers(6, 15)), int(generator.integers(1, 4))
    scenario = uneven_scenario(count, seed) if seed % 2 else random_scenario(count, seed)
    training = Training(
        microbatches=float(generator.integers(1, 30)),
        in_flight=float(generator.integers(1, 9)),
        uniform=float(generator.choice([0.0, 0.3, 1.0])),
    )
    problem = noloco_problem(scenario, stages, training)
    stage_of = np.concatenate(
        [np.repeat(np.arange(stages), 2), generator.integers(0, stages, count - 2 * stages)]
    )
    stage_of = generator.permutation(stage_of)  # unequal groups
    groups = [np.flatnonzero(stage_of == stage).tolist() for stage in range(stages)]
    told, expected = problem.explain(stage_of), by_loops(scenario, groups, training)
    assert told.hops == pytest.approx(expected["hops"])
    assert told.latency == pytest.approx(expected["L"])
    assert told.bottleneck == pytest.approx(expected["Z"])
    assert told.throughput == pytest.approx(expected["X"])
    assert told.gossip == pytest.approx(expected["G"])
    assert told.step == pytest.approx(expected["T"])
    assert problem.cost(stage_of) == pytest.approx(expected["T"])


def one_microbatch(uniform: float = 1.0) -> NolocoProblem:
    """World-wide, its cost being the sum of mean hops there and back plus gossip/50."""
    training = Training(microbatches=1, in_flight=1e9, inner_steps=50, uniform=uniform)
    problem = noloco_problem(given_scenario("case5_worldwide"), 8, training)
    return replace(problem, model=problem.model._replace(microbatches=1.0))


def test_a_region_for_each_stage_costs_what_the_specification_says() -> None:
    problem, blocks = one_microbatch(), np.arange(64) // 8
    times = problem.weights.reshape(8, 8, 8, 8).mean((1, 3))
    order = path_order(times - np.diag(np.diag(times)))
    place = np.empty(8, np.int64)
    place[order] = np.arange(8)
    assert problem.cost(place[blocks]) == pytest.approx(54.9, abs=0.05)


@pytest.mark.long
def test_annealing_finds_what_the_specification_says_or_better() -> None:
    assert run_search(one_microbatch(), anneal, Budget(evaluations=60_000), 0).cost < 51.4


def test_less_random_routing_takes_less_time() -> None:
    """The cheapest flow can only be cheaper than random routing, and the hop is linear in its share."""
    stage_of = one_microbatch().drawn(np.random.default_rng(3))
    costs = [one_microbatch(uniform).cost(stage_of) for uniform in (0.0, 0.5, 1.0)]
    assert costs[0] < costs[1] < costs[2]
    assert costs[1] == pytest.approx((costs[0] + costs[2]) / 2)


@pytest.mark.parametrize("seed", range(40))
def test_the_preferred_flow_is_the_cheapest(seed: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = generator.integers(1, 9, 2)
    times = generator.integers(0, 5, (a, b)).astype(float) if seed % 2 else generator.random((a, b))
    supply, demand = (generator.integers(1, 4, size).astype(float) for size in (a, b))
    supply, demand = supply / supply.sum(), demand / demand.sum()
    flow = np.empty((a, b))
    cheapest_flow(times, supply, demand, flow)
    assert flow.sum(1) == pytest.approx(supply)
    assert flow.sum(0) == pytest.approx(demand)
    assert flow.min() > -1e-9
    assert (flow * times).sum() == pytest.approx((cheapest(times, supply, demand) * times).sum(), abs=1e-9)


# --- pairing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_uniform_pairs_shrink_disagreement_as_the_formula_says(size: int) -> None:
    gap = spectral_gap(uniform_pairs(size))
    assert 1 - gap / 2 == pytest.approx((size - 2) / (2 * (size - 1)))


@pytest.mark.parametrize("size", [4, 8])
def test_disagreement_shrinks_in_simulation_as_the_eigenvalue_says(size: int) -> None:
    """The worst direction, averaged over random pairings drawn as P says."""
    generator = np.random.default_rng(0)
    near = nearest_pairs(generator.random((size, size)))
    share = 0.4
    values, vectors = np.linalg.eigh((1 - share) * near + share * uniform_pairs(size))
    worst, left = vectors[:, -2], []
    for _ in range(4000):
        order = generator.permutation(size).reshape(-1, 2)
        partner = near.argmax(1)
        if generator.random() < share:
            partner[order[:, 0]], partner[order[:, 1]] = order[:, 1], order[:, 0]
        left.append((((worst + worst[partner]) / 2) ** 2).sum())
    assert np.mean(left) == pytest.approx((1 + values[-2]) / 2, rel=0.03)


def test_partners_get_nearer_until_the_floor() -> None:
    times = noloco_problem(given_scenario("case5_worldwide"), 8, Training()).model.gossip[::8][:, ::8]
    at = {floor: pairing(times, floor) for floor in (0.0, 0.3, 0.7, 2.0)}
    seconds = [mean_exchange(pairs, times) for pairs in at.values()]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 4
    assert spectral_gap(at[0.3]) == pytest.approx(0.3, abs=1e-6)
    assert spectral_gap(at[2.0]) == pytest.approx(8 / 7)
    assert seconds[-1] == pytest.approx(times.sum() / 56)


def test_with_an_odd_number_one_stays_alone() -> None:
    pairs = nearest_pairs(np.array([[0, 1, 9], [1, 0, 9], [9, 9, 0.0]]))
    assert pairs.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


# --- unequal devices ----------------------------------------------------------------------------


def flat(count: int, **facts: Any) -> Scenario:
    """Links so fast that only computing counts."""
    latency, bandwidth = np.full((count, count), 1e-6), np.full((count, count), 1e15)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    return Scenario("flat", latency, bandwidth, 1e6, 1e6, **facts)


def test_throughput_is_balanced_not_the_number_of_devices() -> None:
    """Four devices as fast as twelve others: the slow ones gather in larger groups."""
    throughput = np.array([12.0] * 4 + [1.0] * 12)
    problem = noloco_problem(flat(16, throughput=throughput), 4, Training(in_flight=1000))
    found = run_search(problem, anneal, Budget(evaluations=20_000), 1)
    sums = np.bincount(found.stage_of, throughput, minlength=4)
    assert sums.tolist() == [15.0] * 4
    uneven = noloco_problem(
        flat(17, throughput=np.array([12.0] * 3 + [1.0] * 14)), 4, Training(in_flight=1000)
    )
    found = run_search(uneven, anneal, Budget(evaluations=20_000), 1)
    assert sorted(np.bincount(found.stage_of, minlength=4)) == [2, 2, 2, 11]


def test_devices_alike_are_dealt_out_evenly() -> None:
    problem = noloco_problem(flat(19), 4, Training())
    found = run_search(problem, anneal, Budget(evaluations=2000), 0)
    assert sorted(np.bincount(found.stage_of)) == [4, 5, 5, 5]


def test_no_device_gets_a_stage_that_is_too_large_for_it() -> None:
    memory = np.array([8e9] * 6 + [16e9] * 6)
    scenario = flat(12, memory=memory, stage_memory=(12e9, 6e9, 6e9), throughput=np.arange(1.0, 13.0))
    problem = noloco_problem(scenario, 3, Training())
    for seed in range(5):
        drawn = problem.drawn(np.random.default_rng(seed))
        found = run_search(problem, anneal, Budget(evaluations=3000), seed)
        for stage_of in (drawn, found.stage_of):
            assert not np.any(stage_of[memory < 12e9] == 0)
            assert np.bincount(stage_of, minlength=3).min() >= 2
    wrong = np.repeat([0, 1, 2], 4)
    assert problem.cost(wrong) == np.inf


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"memory": np.array([1e9, 8e9, 8e9, 8e9]), "stage_memory": (2e9,)},
            r"memory_bytes\[0\] is too small",
        ),
        ({"memory": np.full(4, 8e9), "stage_memory": (1.0, 2.0, 3.0)}, "has 3 entries"),
        ({"memory": np.array([8e9, 1e9, 1e9, 1e9]), "stage_memory": (4e9, 4e9, 4e9, 1e9)}, "too few devices"),
    ],
)
def test_memory_that_is_not_enough(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        noloco_problem(
            flat(4, **facts), len(facts["stage_memory"]) if "entries" not in said else 2, Training()
        )


def test_fewer_devices_than_stages() -> None:
    with pytest.raises(ScenarioError, match="4 devices cannot fill 5 stages"):
        noloco_problem(flat(4), 5, Training())


def test_the_busiest_resource_is_named() -> None:
    scenario = replace(flat(8), site=np.array([0] * 4 + [-1] * 4), uplinks=np.array([1e3]))
    problem = noloco_problem(scenario, 2, Training())
    assert problem.explain(np.repeat([0, 1], 4)).busiest == "the uplink of site 0"
    slow = replace(scenario, throughput=np.array([1e-9] * 4 + [1.0] * 4))
    assert noloco_problem(slow, 2, Training()).explain(np.repeat([0, 1], 4)).busiest == "computing in stage 0"
