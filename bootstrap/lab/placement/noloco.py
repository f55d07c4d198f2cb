"""NoLoCo's cost of a placement: no all-reduce, activations go to random peers of the next stage.

q_i is replica i's share of its stage's traffic, in proportion to its throughput τ_i (microbatches a second, forward
and backward); p_ij the routing probabilities, (1 − ε)·preferred + ε·q_j; t(i, j, c) = α + 8c/β.

- mean hop h = Σ q_i·p_ij·t(i, j, c_a), c_a the bytes of one microbatch's activations;
- latency of a microbatch there and back L = Σ 2h + Σ mean compute, the mean compute being Σ q_i/τ_i = n/Στ;
- bottleneck Z, the busiest resource's seconds for each microbatch of the swarm: compute q_i/τ_i, a device's link in
  either direction, a site's shared uplink in either direction;
- throughput X = min(1/Z, F/L), F microbatches being in flight in the swarm (Little's law);
- gossip G = mean over i ≠ j of t(i, j, c_g), c_g being all of a stage's state, of the stage where that is longest;
- step T = L + (B − 1)·max(Z, L/F) + G/k, B microbatches of the swarm in a step, k steps in a round.

Groups need not be equal: what counts is Στ of each. The order of the stages is part of a placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar, NamedTuple

import numpy as np

from bootstrap.lab.placement.clusters import MAX_CHEAP_CLUSTERS, block_means, cluster_size, clusters
from bootstrap.lab.placement.kernels import Flags, Floats, Integers, cheapest_flow, compiled
from bootstrap.lab.placement.scenario import Scenario
from bootstrap.lab.placement.seats import fitting, seated
from protocol.errors import ScenarioError


@dataclass(frozen=True)
class Training:
    """The training of the swarm. `microbatches` B and `in_flight` F are of one replica of each stage."""

    microbatches: float = 64.0
    in_flight: float = 16.0
    inner_steps: float = 50.0
    uniform: float = 1.0  # ε: 1 routes at random, as in the paper; 0 to preferred peers alone


@dataclass(frozen=True)
class Terms:
    """Seconds, all but `busiest` (the name of a resource) and `throughput` (microbatches of the swarm a second)."""

    objective: ClassVar[str] = "noloco"
    stages: tuple[tuple[int, ...], ...]  # devices of each
    hops: tuple[float, ...]
    latency: float
    bottleneck: float
    busiest: str
    throughput: float
    gossip: tuple[float, ...]  # mean pair time of each stage
    step: float

    def as_json(self) -> dict[str, object]:
        return {
            "hops": list(self.hops),
            "latency": self.latency,
            "bottleneck": self.bottleneck,
            "busiest": self.busiest,
            "throughput": self.throughput if np.isfinite(self.throughput) else None,
            "gossip": list(self.gossip),
        }

    def sentence(self) -> str:
        return (
            f"A step takes {self.step:.3f} s: a microbatch there and back {self.latency:.3f} s, then one every "
            f"{self.bottleneck * 1000:.1f} ms at most ({self.busiest} is the busiest); "
            f"{self.throughput:.1f} microbatches a second in the steady state."
        )


@dataclass(frozen=True)
class NolocoProblem:
    """Placements of a scenario's devices; `model` holds what the compiled loops need."""

    model: CostArrays
    weights: Floats  # [N, N]: seconds of a macro-batch one way

    @property
    def stages(self) -> int:
        return self.model.stages

    @property
    def order_matters(self) -> bool:
        return self.stages > 2

    def cost(self, stage_of: Integers) -> float:
        """T in seconds; infinite for a stage that is nearly empty or a device that is too small for its stage."""
        return float(step_time(self.model, np.ascontiguousarray(stage_of)))

    def drawn(self, generator: np.random.Generator) -> Integers:
        """Draw a placement with sizes as equal as they and the devices' memory can be."""
        stages, count = self.stages, len(self.weights)
        sizes = np.full(stages, count // stages)
        sizes[generator.permutation(stages)[: count % stages]] += 1
        placement = seated(sizes, self.model.fits, generator)
        if placement is None:
            placement = seated(np.full(stages, self.model.least_size), self.model.fits, generator)
        assert placement is not None, "noloco_problem has seen that the devices fit"
        for device in np.flatnonzero(placement < 0):
            placement[device] = generator.choice(np.flatnonzero(self.model.fits[device]))
        return placement

    def state(self, stage_of: Integers) -> Integers:
        """The array that a walk changes in place: the stage of each device [N]."""
        return stage_of.astype(np.int64)

    def placement(self, state: Integers) -> Integers:
        return state

    def walk(
        self, state: Integers, best: Integers, least: float, temperature: float, steps: int,
        generator: np.random.Generator,
    ) -> float:  # fmt: skip
        """Walk by `anneal_moves`."""
        return float(anneal_moves(self.model, state, best, least, temperature, steps, generator))

    def coarse(self, generator: np.random.Generator) -> tuple[NolocoProblem, Integers] | None:
        """The problem among clusters of devices, and their members [C, m]; None where that is of no use.

        A cluster has the links and throughput of its members together; only exchanges inside one are left out.
        """
        size = cluster_size(len(self.weights), len(self.weights) // self.stages, MAX_CHEAP_CLUSTERS)
        if size == 1 or len(self.weights) % self.stages:
            return None
        members = clusters(self.weights, size, generator)
        model = self.model
        grouped_model = model._replace(
            least_size=1,
            fits=np.array([model.fits[own].all(0) for own in members]),
            activation=block_means(model.activation, members),
            occupied=block_means(model.occupied, members),
            gossip=block_means(model.gossip, members),
            throughput=model.throughput[members].sum(1),
            site=model.site[members[:, 0]],
            held=model.held[members].sum(1),
        )
        return NolocoProblem(grouped_model, block_means(self.weights, members)), members

    def explain(self, stage_of: Integers) -> Terms:
        """Every term of the step time of a placement."""
        model = self.model
        members, starts = grouped(stage_of, model.stages)
        terms = terms_of(model, members, starts)
        what = "device" if (model.held == 1).all() else "cluster"
        busy = {f"the link of {what} {device}": time for device, time in enumerate(terms.links.tolist())}
        busy |= {f"computing in stage {stage}": time for stage, time in enumerate(terms.compute.tolist())}
        busy |= {f"the uplink of site {site}": time for site, time in enumerate(terms.uplinks.tolist())}
        busiest, bottleneck = max(busy.items(), key=itemgetter(1))
        latency = float(terms.latency)
        rate = min(1 / bottleneck if bottleneck else np.inf, model.in_flight / latency if latency else np.inf)
        return Terms(
            stages=tuple(tuple(stage.tolist()) for stage in np.split(members, starts[1:-1])),
            hops=tuple(terms.hops.tolist()),
            latency=latency,
            bottleneck=bottleneck,
            busiest=busiest,
            throughput=float(rate),
            gossip=tuple(terms.pairs.tolist()),
            step=float(combined(model, terms, bottleneck)),
        )


def noloco_problem(scenario: Scenario, stages: int, training: Training) -> NolocoProblem:
    """Make a scenario's problem. Raises `ScenarioError` when devices are too few, or too small, for the stages."""
    count = scenario.devices
    if count < stages:
        raise ScenarioError(f"{count} devices cannot fill {stages} stages: ask for fewer stages.")
    fits = fitting(scenario, stages)
    least_size = min(2, count // stages)
    while seated(np.full(stages, least_size), fits, np.random.default_rng(0)) is None:
        least_size -= 1
        if not least_size:
            raise ScenarioError(
                "memory_bytes: too few devices are large enough for the stages; use more stages."
            )
    held = np.array([len(own) for own in scenario.members] or [1] * count, np.float64)
    of_swarm = held.sum() / stages  # microbatches of a replica to those of the swarm
    nbytes = scenario.pipeline_bytes / training.microbatches
    measured = scenario.throughput
    model = CostArrays(
        stages=stages,
        least_size=least_size,
        sizes_vary=measured is not None and bool(np.ptp(measured) > 0),
        fits=fits,
        activation=scenario.transfer(nbytes),
        occupied=8 * nbytes / scenario.bandwidth,
        gossip=scenario.transfer(scenario.data_parallel_bytes),
        throughput=held if measured is None else measured,
        computes=measured is not None,
        site=np.full(count, -1) if scenario.site is None else scenario.site,
        uplink=np.zeros(0) if scenario.uplinks is None else 8 * nbytes / scenario.uplinks,
        uniform=float(training.uniform),
        microbatches=float(training.microbatches * of_swarm),
        in_flight=float(training.in_flight * of_swarm),
        inner_steps=float(training.inner_steps),
        held=held,
    )
    return NolocoProblem(model, scenario.transfer(scenario.pipeline_bytes))


# --- the step time, compiled ------------------------------------------------------------------


class CostArrays(NamedTuple):
    """The arrays of a scenario and a training for the compiled loops. [N, N] are seconds from device to device."""

    stages: int
    least_size: int  # of a stage: nobody is to be the only one that has it
    sizes_vary: bool
    fits: Flags  # [N, S]: the device's memory is enough for the stage
    activation: Floats  # [N, N]: t(i, j, c_a)
    occupied: Floats  # [N, N]: 8·c_a/β
    gossip: Floats  # [N, N]: t(i, j, c_g)
    throughput: Floats  # [N]: τ
    computes: bool
    site: Integers  # [N]: the uplink that a device is behind, or −1
    uplink: Floats  # [K]: 8·c_a/β of each shared uplink
    uniform: float  # ε, the share of traffic that is routed at random by throughput
    microbatches: float
    in_flight: float
    inner_steps: float
    held: Floats  # [N]: how many devices each stands for, 1 but for clusters


class TermArrays(NamedTuple):
    """Seconds for one microbatch of the swarm, but `pairs` for one exchange."""

    hops: Floats  # [S − 1]: h = Σ q_i·p_ij·t
    compute: Floats  # [S]: 1/Στ
    links: Floats  # [N]: activations to the next stage and gradients to the one before; as much comes in
    uplinks: Floats  # [K]: what crosses the border of a site
    pairs: Floats  # [S]: G
    latency: float  # L


@compiled
def grouped(stage_of: Integers, stages: int) -> tuple[Integers, Integers]:
    """Return `members` [N] and `starts` [S + 1]: stage s is members[starts[s] : starts[s + 1]]."""
    starts = np.zeros(stages + 1, np.int64)
    starts[1:] = np.bincount(stage_of, minlength=stages).cumsum()
    members, seat = np.empty(stage_of.size, np.int64), starts.copy()
    for device in range(stage_of.size):
        members[seat[stage_of[device]]] = device
        seat[stage_of[device]] += 1
    return members, starts


@compiled
def terms_of(model: CostArrays, members: Integers, starts: Integers) -> TermArrays:
    """All terms of the placement that `grouped` gives."""
    stages = model.stages
    hops, compute, pairs = np.zeros(stages - 1), np.zeros(stages), np.zeros(stages)
    links, uplinks = np.zeros(members.size), np.zeros(model.uplink.size)
    latency = 0.0
    for s in range(stages):
        group = members[starts[s] : starts[s + 1]]
        for i in group:
            for j in group:
                pairs[s] += model.gossip[i, j]
        if group.size > 1:
            pairs[s] /= group.size * (group.size - 1)
        if model.computes:
            compute[s] = 1 / model.throughput[group].sum()
        if s + 1 < stages:
            hops[s] = add_hop(model, group, members[starts[s + 1] : starts[s + 2]], links, uplinks)
            latency += 2 * hops[s]
        latency += compute[s] * model.held[group].sum()
    return TermArrays(hops, compute, links / model.held, uplinks, pairs, latency)


@compiled
def add_hop(model: CostArrays, group: Integers, following: Integers, links: Floats, uplinks: Floats) -> float:
    """The mean hop from `group` to the `following` stage; adds what it keeps `links` and `uplinks` busy."""
    supply, demand = model.throughput[group], model.throughput[following]
    supply, demand = supply / supply.sum(), demand / demand.sum()
    flow = np.zeros((group.size, following.size))
    if model.uniform < 1:
        cheapest_flow(model.activation[group][:, following], supply, demand, flow)
    hop = 0.0
    for a in range(group.size):
        for b in range(following.size):
            i, j = group[a], following[b]
            share = (1 - model.uniform) * flow[a, b] + model.uniform * supply[a] * demand[b]
            hop += share * model.activation[i, j]
            links[i] += share * model.occupied[i, j]
            links[j] += share * model.occupied[i, j]
            if model.site[i] != model.site[j]:
                for site in (model.site[i], model.site[j]):
                    if site >= 0:
                        uplinks[site] += share * model.uplink[site]
    return hop


@compiled
def combined(model: CostArrays, terms: TermArrays, bottleneck: float) -> float:
    """T = L + (B − 1)·max(Z, L/F) + G/k, with `bottleneck` Z."""
    pace = max(bottleneck, terms.latency / model.in_flight)
    step: float = terms.latency + (model.microbatches - 1) * pace + terms.pairs.max() / model.inner_steps
    return step


@compiled
def step_time(model: CostArrays, stage_of: Integers) -> float:
    """T in seconds of `stage_of` [N]; infinite when a stage is too small or a device does not fit."""
    members, starts = grouped(stage_of, model.stages)
    if (starts[1:] - starts[:-1]).min() < model.least_size:
        return np.inf
    for device in range(stage_of.size):
        if not model.fits[device, stage_of[device]]:
            return np.inf
    terms = terms_of(model, members, starts)
    busiest = max(terms.links.max(), terms.compute.max())
    if terms.uplinks.size:
        busiest = max(busiest, terms.uplinks.max())
    return combined(model, terms, busiest)


# --- annealing --------------------------------------------------------------------------------


@compiled
def change(model: CostArrays, stage_of: Integers, generator: np.random.Generator) -> None:
    """Make one random change in place: of the stages' order now and then, else of one or two devices."""
    stages, count = model.stages, stage_of.size
    kind = generator.random()
    if kind < 0.05 and stages > 2:  # the stages between two turn round: the links at the two ends change
        first, last = int(generator.integers(0, stages)), int(generator.integers(0, stages))
        first, last = min(first, last), max(first, last)
        for device in range(count):
            if first <= stage_of[device] <= last:
                stage_of[device] = first + last - stage_of[device]
        return
    device, other = int(generator.integers(0, count)), int(generator.integers(0, count))
    if model.sizes_vary and kind > 0.7:
        stage_of[device] = generator.integers(0, stages)
        return
    while stage_of[other] == stage_of[device]:
        other = int(generator.integers(0, count))
    stage_of[device], stage_of[other] = stage_of[other], stage_of[device]


@compiled
def anneal_moves(
    model: CostArrays, stage_of: Integers, best: Integers, least: float, temperature: float, steps: int,
    generator: np.random.Generator,
) -> float:  # fmt: skip
    """Tries `steps` changes of `stage_of` at one `temperature`, the Metropolis rule deciding.

    `stage_of` [N] is left at the current placement; `best` becomes the best seen when that is below `least`, and its
    cost is returned.
    """
    current = step_time(model, stage_of)
    if current < least:
        least, best[:] = current, stage_of
    before = stage_of.copy()
    for _ in range(steps):
        before[:] = stage_of
        limit = current - temperature * np.log(generator.random())
        change(model, stage_of, generator)
        cost = step_time(model, stage_of)
        if cost <= limit:
            current = cost
            if cost < least:
                least, best[:] = cost, stage_of
        else:
            stage_of[:] = before
    return least
