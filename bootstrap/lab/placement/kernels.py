"""The algorithms on graphs behind both costs: bottleneck matching, shortest path through all stages, cheapest flow.

Compiled by numba at their first use and kept on disk. Nothing is checked: the callers are `dtfm`, `noloco_step` and
the searches beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
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
    """Count the bits of a set that are 1."""
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


# --- preferred routing: the flow from one stage's replicas to the next one's -------------------------

EPSILON = 1e-12  # shares below this are rounding


class PathSearch(NamedTuple):
    """Memory for one search of a shortest path: distances, what each was reached from (−1: a start), and which are
    final.
    """

    row_distance: Floats
    column_distance: Floats
    from_row: Integers  # [b]
    from_column: Integers  # [a]
    row_done: Flags
    column_done: Flags


@compiled
def cheapest_flow(times: Floats, supply: Floats, demand: Floats, flow: Floats) -> None:
    """Fills `flow` [a, b], rows summing to `supply` [a] and columns to `demand` [b], so that Σ flow·times is least.

    Both sum to 1; `times` [a, b] is not negative. Successive shortest paths with potentials: with equal shares it
    is the assignment, one partner for each replica.
    """
    a, b = times.shape
    left, wanted = supply.copy(), demand.copy()
    row_price, column_price = np.zeros(a), np.zeros(b)
    flow[:] = 0.0
    search = PathSearch(
        np.empty(a), np.empty(b), np.empty(b, np.int64), np.empty(a, np.int64),
        np.empty(a, np.bool_), np.empty(b, np.bool_),
    )  # fmt: skip
    for _ in range(4 * a * b):  # each path empties a row, a column or a link; far fewer are needed
        end = shortest_way(times, flow, left, wanted, row_price, column_price, search)
        if end < 0:
            return
        send(flow, left, wanted, end, search)
        reached = search.column_distance[end]
        for i in range(a):
            row_price[i] += min(search.row_distance[i], reached) if search.row_done[i] else reached
        for j in range(b):
            column_price[j] += min(search.column_distance[j], reached) if search.column_done[j] else reached


@compiled
def shortest_way(
    times: Floats, flow: Floats, left: Floats, wanted: Floats, row_price: Floats, column_price: Floats,
    search: PathSearch,
) -> int:  # fmt: skip
    """Dijkstra's, from rows with something left to the nearest column that wants some: that one, −1 for none."""
    row_distance, distance = search.row_distance, search.column_distance
    search.row_done[:], search.column_done[:] = False, False
    row_distance[:] = np.where(left > EPSILON, 0.0, np.inf)
    distance[:] = np.inf
    search.from_column[:] = -1
    while True:
        row, column = nearest(search)
        if row < 0 and column < 0:
            return -1
        if column < 0:
            search.row_done[row] = True
            for j in range(distance.size):
                step = row_distance[row] + times[row, j] + row_price[row] - column_price[j]
                if not search.column_done[j] and step < distance[j]:
                    distance[j], search.from_row[j] = step, row
            continue
        search.column_done[column] = True
        if wanted[column] > EPSILON:
            return column
        for i in range(row_distance.size):  # back over a link that carries something
            if not search.row_done[i] and flow[i, column] > EPSILON:
                step = distance[column] - (times[i, column] + row_price[i] - column_price[column])
                if step < row_distance[i]:
                    row_distance[i], search.from_column[i] = step, column


@compiled
def nearest(search: PathSearch) -> tuple[int, int]:
    """The nearest row or column that is not final yet, the other −1; both −1 when none can be reached."""
    row, column, least = -1, -1, np.inf
    for i in range(search.row_distance.size):
        if not search.row_done[i] and search.row_distance[i] < least:
            row, least = i, search.row_distance[i]
    for j in range(search.column_distance.size):
        if not search.column_done[j] and search.column_distance[j] < least:
            row, column, least = -1, j, search.column_distance[j]
    return row, column


@compiled
def send(flow: Floats, left: Floats, wanted: Floats, end: int, search: PathSearch) -> None:
    """Send as much as the way to `end` takes: what its row has left, its column wants, its links can give back."""
    amount, j = wanted[end], end
    while search.from_column[search.from_row[j]] >= 0:
        i = search.from_row[j]
        j = search.from_column[i]
        amount = min(amount, flow[i, j])
    amount = min(amount, left[search.from_row[j]])
    wanted[end] -= amount
    j = end
    while True:
        i = search.from_row[j]
        flow[i, j] += amount
        if search.from_column[i] < 0:
            left[i] -= amount
            return
        j = search.from_column[i]
        flow[i, j] -= amount
