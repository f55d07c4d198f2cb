"""Preferred routing: the flow from one stage's replicas to the next one's with the least mean time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.kernels import compiled

Floats = NDArray[np.float64]

EPSILON = 1e-12  # shares below this are rounding


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
    distance, row_distance = np.empty(b), np.empty(a)
    from_row, from_column = np.empty(b, np.int64), np.empty(a, np.int64)
    row_done, column_done = np.empty(a, np.bool_), np.empty(b, np.bool_)
    for _ in range(4 * a * b):  # each path empties a row, a column or a link; far fewer are needed
        row_done[:], column_done[:] = False, False
        for i in range(a):
            row_distance[i] = 0.0 if left[i] > EPSILON else np.inf
            from_column[i] = -1
        distance[:] = np.inf
        end = -1
        while True:
            row, column, nearest = -1, -1, np.inf
            for i in range(a):
                if not row_done[i] and row_distance[i] < nearest:
                    row, nearest = i, row_distance[i]
            for j in range(b):
                if not column_done[j] and distance[j] < nearest:
                    column, row, nearest = j, -1, distance[j]
            if row < 0 and column < 0:
                break
            if column >= 0:
                column_done[column] = True
                if wanted[column] > EPSILON:
                    end = column
                    break
                for i in range(a):  # back over a link that carries something
                    if not row_done[i] and flow[i, column] > EPSILON:
                        step = nearest - (times[i, column] + row_price[i] - column_price[column])
                        if step < row_distance[i]:
                            row_distance[i], from_column[i] = step, column
            else:
                row_done[row] = True
                for j in range(b):
                    step = nearest + times[row, j] + row_price[row] - column_price[j]
                    if not column_done[j] and step < distance[j]:
                        distance[j], from_row[j] = step, row
        if end < 0:
            return
        amount, j = wanted[end], end
        while True:
            i = from_row[j]
            if from_column[i] < 0:
                amount = min(amount, left[i])
                break
            j = from_column[i]
            amount = min(amount, flow[i, j])
        wanted[end] -= amount
        j = end
        while True:
            i = from_row[j]
            flow[i, j] += amount
            if from_column[i] < 0:
                left[i] -= amount
                break
            j = from_column[i]
            flow[i, j] -= amount
        reached = distance[end]
        for i in range(a):
            row_price[i] += min(row_distance[i], reached) if row_done[i] else reached
        for j in range(b):
            column_price[j] += min(distance[j], reached) if column_done[j] else reached
