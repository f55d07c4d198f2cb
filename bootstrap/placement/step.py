"""The terms of NoLoCo's step time, compiled: mean hops, what each resource is busy, gossip."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.kernels import compiled
from bootstrap.placement.transport import cheapest_flow

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@compiled
def fill_terms(
    members: Integers, starts: Integers, activation: Floats, occupied: Floats, gossip: Floats,
    throughput: Floats, computes: bool, site: Integers, uplink: Floats, uniform: float,
    hops: Floats, compute: Floats, links: Floats, uplinks: Floats, pairs: Floats,
) -> None:  # fmt: skip
    """Fills the last five, all in seconds for one microbatch of the swarm, but `pairs` for one exchange.

    Stage s is `members`[`starts`[s] : `starts`[s + 1]]. [N, N]: `activation` t(i, j, c_a), `occupied` 8·c_a/β,
    `gossip` t(i, j, c_g). `throughput` [N] τ. `site` [N] is the uplink that a device is behind or −1, `uplink`
    [K] its 8·c_a/β. `uniform`: ε, the share of traffic that is routed at random by throughput.

    `hops` [S − 1]: h = Σ q_i·p_ij·t. `compute` [S]: 1/Στ. `links` [N]: activations to the next stage and gradients
    to the one before; as much comes in. `uplinks` [K]: what crosses the border of a site. `pairs` [S]: G.
    """
    stages = starts.size - 1
    hops[:], compute[:], links[:], uplinks[:], pairs[:] = 0.0, 0.0, 0.0, 0.0, 0.0
    for s in range(stages):
        group = members[starts[s] : starts[s + 1]]
        total = 0.0
        for i in group:
            total += throughput[i]
            for j in group:
                pairs[s] += gossip[i, j]
        if group.size > 1:
            pairs[s] /= group.size * (group.size - 1)
        if computes:
            compute[s] = 1 / total
        if s + 1 == stages:
            break
        following = members[starts[s + 1] : starts[s + 2]]
        supply, demand = throughput[group] / total, throughput[following].copy()
        demand /= demand.sum()
        flow = np.zeros((group.size, following.size))
        if uniform < 1:
            times = np.empty_like(flow)
            for a in range(group.size):
                for b in range(following.size):
                    times[a, b] = activation[group[a], following[b]]
            cheapest_flow(times, supply, demand, flow)
        for a in range(group.size):
            i = group[a]
            for b in range(following.size):
                j = following[b]
                share = (1 - uniform) * flow[a, b] + uniform * supply[a] * demand[b]
                hops[s] += share * activation[i, j]
                links[i] += share * occupied[i, j]
                links[j] += share * occupied[i, j]
                if site[i] != site[j]:
                    if site[i] >= 0:
                        uplinks[site[i]] += share * uplink[site[i]]
                    if site[j] >= 0:
                        uplinks[site[j]] += share * uplink[site[j]]


@compiled
def combined(
    latency: float, bottleneck: float, exchange: float, microbatches: float, in_flight: float, inner_steps: float,
    hidden: float,
) -> float:  # fmt: skip
    """T = L + (B − 1)·max(Z, L/F) + max(0, G − w)/k."""
    pace = max(bottleneck, latency / in_flight)
    return latency + (microbatches - 1) * pace + max(0.0, exchange - hidden) / inner_steps
