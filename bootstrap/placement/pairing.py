"""Which replicas of a stage average with each other: how fast that mixes, and how near the partners are.

A round's pairing is a matrix P [n, n] of probabilities, symmetric, its rows summing to 1 with the chance of staying
alone on the diagonal. Under plain averaging of pairs the squared disagreement shrinks by (1 + λ₂(P))/2 a round, λ₂
being the largest eigenvalue of P on vectors that sum to 0: (n − 2)/(2(n − 1)) for uniform pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bootstrap.placement.kernels import Floats
from node.machine.limits import optional

networkx = optional("networkx", "plan")


@dataclass(frozen=True)
class PairMixing:
    """`probabilities` P [n, n]; `gap` 1 − λ₂(P); `shrink` a round; `seconds` mean time of an exchange."""

    probabilities: Floats
    gap: float
    shrink: float
    seconds: float


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
    for i in range(size):
        for j in range(i):
            graph.add_edge(i, j, weight=float(times[i, j]))
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
    centred = pairs - 1 / size  # takes the eigenvector of ones, and its eigenvalue 1, to 0
    basis = np.linalg.qr(np.column_stack([np.ones(size), np.eye(size)[:, 1:]]))[0][:, 1:]
    return 1.0 - float(np.linalg.eigvalsh(basis.T @ centred @ basis)[-1])


def pairing(times: Floats, floor: float) -> PairMixing:
    """The nearest pairs that mix well enough: P = (1 − ε)·nearest + ε·uniform with the least ε of 1 − λ₂ ≥ `floor`.

    `times` [n, n] in seconds for one exchange. Floors above what uniform pairs reach give uniform pairs.
    """
    size = len(times)
    near, uniform = nearest_pairs(times), uniform_pairs(size)
    low, high = 0.0, 1.0
    for _ in range(40):  # the gap grows with ε, since uniform pairs have the same λ on all such vectors
        middle = (low + high) / 2
        if spectral_gap((1 - middle) * near + middle * uniform) >= floor:
            high = middle
        else:
            low = middle
    pairs = (1 - high) * near + high * uniform
    gap = spectral_gap(pairs)
    meeting = pairs * ~np.eye(size, dtype=bool)
    seconds = float((meeting * times).sum() / meeting.sum()) if meeting.any() else 0.0
    return PairMixing(pairs, gap, 1 - gap / 2, seconds)
