"""Preferred routing: the flow from one stage's replicas to the next one's with the least mean time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.kernels import compiled

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

EPSILON = 1e-12  # shares below this are rounding


class PathSearch(NamedTuple):
    """Of one shortest path: distances, what each was reached from (−1: a start), and which are final."""

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
    """As much as the way to `end` takes: what its row has left, its column wants, its links can give back."""
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
