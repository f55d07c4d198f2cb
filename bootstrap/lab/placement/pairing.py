"""The pairing of a stage's replicas for averaging: how fast it mixes, and how near the partners are.

A round's pairing is a matrix P [n, n] of probabilities, symmetric, its rows summing to 1 with the chance of staying
alone on the diagonal. Under plain averaging of pairs the squared disagreement shrinks by (1 + λ₂(P))/2 a round, λ₂
being the largest eigenvalue of P on vectors that sum to 0: (n − 2)/(2(n − 1)) for uniform pairs.
"""

from __future__ import annotations

import numpy as np

from bootstrap.lab.placement.kernels import Floats
from node.machine.limits import optional

networkx = optional("networkx", "lab")


def uniform_pairs(size: int) -> Floats:
    """Every pair as likely as any other, nobody alone."""
    pairs = np.full((size, size), 1 / max(1, size - 1))
    np.fill_diagonal(pairs, 0.0 if size > 1 else 1.0)
    return pairs


def nearest_pairs(times: Floats) -> Floats:
    """The perfect matching with the least sum of `times` [n, n]; with an odd n one is alone."""
    size = len(times)
    graph = networkx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_weighted_edges_from((i, j, float(times[i, j])) for i in range(size) for j in range(i))
    pairs = np.zeros((size, size))
    for i, j in networkx.min_weight_matching(graph):
        pairs[i, j] = pairs[j, i] = 1.0
    np.fill_diagonal(pairs, 1.0 - pairs.sum(1))
    return pairs


def spectral_gap(pairs: Floats) -> float:
    """1 − λ₂(P): 0 when some replicas never hear of others; n/(n − 1) for uniform pairs, the most there is."""
    size = len(pairs)
    if size == 1:
        return 1.0
    # less 2/n everywhere, the vector of ones has −1, which is the least that any can have
    return 1.0 - float(np.linalg.eigvalsh(pairs - 2 / size)[-1])


def pairing(times: Floats, floor: float) -> Floats:
    """The nearest pairs that mix well enough: P = (1 − ε)·nearest + ε·uniform with the least ε of 1 − λ₂ ≥ `floor`.

    `times` [n, n] in seconds for one exchange. Floors above what uniform pairs reach give uniform pairs.
    """
    near, uniform = nearest_pairs(times), uniform_pairs(len(times))
    least, most = spectral_gap(near), spectral_gap(uniform)
    # the gap is linear in ε, since uniform pairs have the same λ on all vectors that sum to 0
    share = np.clip((floor - least) / max(most - least, 1e-12), 0.0, 1.0)
    pairs: Floats = (1 - share) * near + share * uniform
    return pairs


def mean_exchange(pairs: Floats, times: Floats) -> float:
    """Seconds that an exchange takes under P, of `times` [n, n]; 0 when nobody meets."""
    meeting = pairs * ~np.eye(len(pairs), dtype=bool)
    return float((meeting * times).sum() / meeting.sum()) if meeting.any() else 0.0
