"""The link matrix of the page: between members where they are few, between stages where they are many. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bootstrap.inspect.link_map import LinkMap, MappedNode, link_map
from bootstrap.inspect.observer import Sighting

MOST_MEMBERS = 48  # in a matrix that a person can read
Floats = NDArray[np.float64]


def matrix_of(sightings: Sequence[Sighting]) -> dict[str, object]:
    """Return "names", and from the row's to the column's "ms" one way and "mbit" a second, null where not measured.

    With more than `MOST_MEMBERS` members "by" is "stage", and the numbers are medians over the measured pairs.
    """
    found = link_map(
        MappedNode(
            s.member.peer,
            s.member.announcement.stage,
            s.stats.links if s.stats else s.member.announcement.links,
        )
        for s in sightings
    )
    latency, bandwidth = found.latency_s * 1e3, found.bandwidth * 8e-6
    if len(found.peers) <= MOST_MEMBERS:
        names = [{"id": peer, "stage": stage} for peer, stage in zip(found.peers, found.stages, strict=True)]
        return {"by": "member", "names": names, "ms": _rows(latency), "mbit": _rows(bandwidth)}
    stages = sorted(set(found.stages))[:MOST_MEMBERS]
    medians = [_rows(_by_stage(values, found, stages)) for values in (latency, bandwidth)]
    return {"by": "stage", "names": [{"stage": s} for s in stages], "ms": medians[0], "mbit": medians[1]}


def _by_stage(values: Floats, found: LinkMap, stages: Sequence[int]) -> Floats:
    of = np.array(found.stages)
    result = np.full((len(stages), len(stages)), np.nan)
    for i, row in enumerate(stages):
        for j, column in enumerate(stages):
            block = values[np.ix_(of == row, of == column)]
            known = block[~np.isnan(block)]
            result[i, j] = np.median(known) if len(known) else np.nan
    return result


def _rows(values: Floats) -> list[list[float | None]]:
    """The values with four digits, None where nobody measured."""
    return [[None if np.isnan(x) else float(f"{x:.4g}") for x in row] for row in values.tolist()]
