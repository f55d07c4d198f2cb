"""The layers of each stage: the contiguous cut whose slowest stage is fastest. Pure.

Stages are compared by the multiplications that a token costs there, the head counted where it is computed. Among
cuts with equally slow slowest stages the one counts whose largest stage has the fewest parameters, and among those
the most even one, the first stages one layer longer. Every stage has a layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from protocol.run.model import Model


def layer_work(model: Model, sequence_tokens: int) -> int:
    """Multiplications that a token costs in a layer, forward: by the weights, and for scores and values."""
    return model.layer_parameters + 2 * sequence_tokens * model.heads * model.head_size


def head_work(model: Model) -> int:
    """Multiplications that a token costs in the head, forward. The embedding is looked up and costs none."""
    return model.table_parameters


@lru_cache(maxsize=64)
def starts_of(model: Model, sequence_tokens: int, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and behind them the number of layers, [stages + 1].

    With tied embeddings the matrix, and with it the head's work, is in the first stage alone.
    """
    head, table, tied = head_work(model), model.table_parameters, model.tied_embeddings
    # what a layer weighs, and what else there is in the first and in the last stage
    work = layer_work(model, sequence_tokens), head if tied else 0, 0 if tied else head
    size = model.layer_parameters, table, 0 if tied else table
    most = [model.layers] * stages
    for layer, first, last in (work, size):
        besides = [0] * stages
        besides[0] += first
        besides[-1] += last
        allowed = _least_largest(model.layers, layer, besides, most)
        most = [max(1, min(old, (allowed - b) // layer)) for old, b in zip(most, besides, strict=True)]
    return tuple(accumulate(_evenly(model.layers, most), initial=0))


def _least_largest(layers: int, layer: int, besides: Sequence[int], most: Sequence[int]) -> int:
    """The least bound on every stage's cost under which `layers` find a place, one at least in each stage."""
    kinds = {(beside, limit) for beside, limit in zip(besides, most, strict=True)}
    floor = max(besides) + layer
    costs = {b + n * layer for b, limit in kinds for n in range(1, limit + 1)}
    bounds = sorted({floor, *(cost for cost in costs if cost > floor)})

    def fits(bound: int) -> bool:
        return sum(min(m, (bound - b) // layer) for b, m in zip(besides, most, strict=True)) >= layers

    return bounds[bisect_left(bounds, True, hi=len(bounds) - 1, key=fits)]


def _evenly(layers: int, most: Sequence[int]) -> list[int]:
    """Layers of each stage, none above its limit, otherwise as even as they go."""
    counts = [0] * len(most)
    left = layers
    while left:
        open_ = [stage for stage, limit in enumerate(most) if counts[stage] < limit]
        each = max(1, min(left // len(open_), min(most[s] - counts[s] for s in open_)))
        for stage in open_[: min(len(open_), left)]:
            counts[stage] += each
            left -= each
    return counts
