"""Compiled loops of the cost models: the matching whose largest weight is smallest, the shortest path through stages.

Compiled by numba at their first use and kept on disk. Nothing is checked: the callers are `dtfm`, `noloco` and
the searches beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(kernel: Kernel) -> Kernel:
    try:
        return numba.njit(cache=True, error_model="numpy")(kernel)  # type: ignore[no-any-return]
    except RuntimeError:  # there is no directory to keep it in that can be written to
        return numba.njit(error_model="numpy")(kernel)  # type: ignore[no-any-return]


@compiled
def bottleneck(weights: Floats, rows: Integers, columns: Integers, partner: Integers) -> float:
    """The smallest possible largest weight of a perfect matching of `rows` to `columns`, n of each.

    `weights` [N, N] is indexed by their entries. `partner` [n] becomes the place in `rows` of each column's partner.
    A row at a time, by the path of alternating edges whose largest weight is smallest: O(n³).
    """
    n = rows.size
    largest = -np.inf
    for i in range(n):  # no matching does better than the cheapest entry of a row or column
        in_row, in_column = np.inf, np.inf
        for j in range(n):
            in_row = min(in_row, weights[rows[i], columns[j]])
            in_column = min(in_column, weights[rows[j], columns[i]])
        largest = max(largest, in_row, in_column)
    reach, came_from, done = np.empty(n), np.empty(n, np.int64), np.empty(n, np.bool_)
    partner[:] = -1
    for start in range(n):
        reach[:], done[:] = np.inf, False
        row, last = start, -1
        while True:
            chosen = -1
            for j in range(n):
                if done[j]:
                    continue
                weight = max(largest, weights[rows[row], columns[j]])
                if weight < reach[j]:
                    reach[j], came_from[j] = weight, last
                if (
                    chosen < 0
                    or reach[j] < reach[chosen]
                    or (reach[j] == reach[chosen] and partner[j] < 0 and partner[chosen] >= 0)
                ):
                    chosen = j
            largest = max(largest, reach[chosen])
            if partner[chosen] < 0:
                break
            done[chosen], last = True, chosen
            row = partner[chosen]
        while came_from[chosen] >= 0:  # every column on the path takes over the row of the one before it
            partner[chosen] = partner[came_from[chosen]]
            chosen = came_from[chosen]
        partner[chosen] = start
    return largest


@compiled
def members(chosen: int) -> int:
    """How many bits of a set are 1."""
    count = 0
    while chosen:
        chosen &= chosen - 1
        count += 1
    return count


@compiled
def shortest_path(hops: Floats, shortest: Floats) -> float:
    """Length of the shortest open path through all S ≥ 2 stages; `hops` [S, S] is symmetric.

    Held and Karp, but only up to half of the stages, since a path is two halves that meet: S = 8 takes a tenth of
    the whole table's work. `shortest` [2^S, S] becomes, for sets of up to ⌈S/2⌉ stages, the shortest path through
    them that ends in a given one.
    """
    count = hops.shape[0]
    half = (count + 1) // 2
    everything = (1 << count) - 1
    for chosen in range(1, everything):  # a set's subsets have smaller numbers
        if members(chosen) > half:
            continue
        for last in range(count):
            before = chosen ^ (1 << last)
            if before > chosen:
                continue
            length = np.inf if before else 0.0
            for previous in range(count):
                if before >> previous & 1:
                    length = min(length, shortest[before, previous] + hops[previous, last])
            shortest[chosen, last] = length
    found = np.inf
    for chosen in range(1, everything):
        other = everything ^ chosen
        if members(chosen) != half or (2 * half == count and other > chosen):
            continue
        for u in range(count):
            for v in range(count):
                if chosen >> u & 1 and other >> v & 1:
                    found = min(found, shortest[chosen, u] + hops[u, v] + shortest[other, v])
    return found


@compiled
def data_parallel(times: Floats, group: Integers) -> float:
    """max over d of Σ over e of `times`[d, e], both in `group` [n]; the diagonal of `times` [N, N] is 0."""
    slowest = 0.0
    for d in group:
        total = 0.0
        for e in group:
            total += times[d, e]
        slowest = max(slowest, total)
    return slowest


@compiled
def communication(
    parallel: Floats, pipeline: Floats, groups: Integers, hops: Floats, shortest: Floats
) -> float:
    """COMM of `groups` [S, n], in the unit of `parallel` and `pipeline` [N, N]; fills `hops` and `shortest`."""
    count = groups.shape[0]
    partner = np.empty(groups.shape[1], np.int64)
    slowest = 0.0
    for s in range(count):
        slowest = max(slowest, data_parallel(parallel, groups[s]))
        hops[s, s] = 0.0
        for t in range(s):
            hops[s, t] = hops[t, s] = bottleneck(pipeline, groups[s], groups[t], partner)
    return slowest + (shortest_path(hops, shortest) if count > 1 else 0.0)
