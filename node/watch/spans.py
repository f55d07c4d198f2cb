"""Sets of instants, as disjoint spans in order: what overlaps what, and for how long. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Spans = npt.NDArray[np.float64]  # [n, 2] disjoint and in order, in seconds
NOTHING: Spans = np.empty((0, 2))


def merged(spans: npt.ArrayLike) -> Spans:
    """The union of spans [n, 2], which may overlap, in any order."""
    ordered = np.array(spans, dtype=np.float64).reshape(-1, 2)
    if not len(ordered):
        return NOTHING
    ordered = ordered[np.argsort(ordered[:, 0])]
    ends = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate([[True], ordered[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([ordered[first, 0], ends[last]], axis=1)


def without(spans: Spans) -> Spans:
    """The instants that are in none of these spans."""
    edges = np.concatenate([[-np.inf], spans.ravel(), [np.inf]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def common(a: Spans, b: Spans) -> Spans:
    """The instants in both: all but those that one of them lacks."""
    return without(merged(np.vstack([without(a), without(b)])))


def length(spans: Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())
