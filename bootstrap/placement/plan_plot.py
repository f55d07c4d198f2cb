"""The picture of a plan: devices on a map, or the matrix of links sorted by stage; and cost against time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.figure import figure
from bootstrap.placement.plan import Placement
from bootstrap.placement.scenario import Scenario

COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9")


def plot_plan(plan: Placement, scenario: Scenario, plans: Sequence[Placement], file: Path) -> None:
    """`plan` on the left, the searches of `plans` on the right. Raises `UserError` when it cannot be written."""
    with figure(file, panels=2) as (left, right):
        if scenario.coordinates is not None:
            _map(left, plan, scenario)
        else:
            _matrix(left, plan, scenario)
        _curves(right, plans)


def _map(axis: Any, plan: Placement, scenario: Scenario) -> None:
    """Devices at one place stand in a ring; grey lines lead from stage to stage."""
    assert scenario.coordinates is not None
    places = _spread(scenario.coordinates)
    for here, there in pairwise(plan.stages):
        for a, b in zip(here, there, strict=False):
            axis.plot(places[[a, b], 1], places[[a, b], 0], color="0.85", linewidth=0.5, zorder=0)
    for stage, devices in enumerate(plan.stages):
        own = places[list(devices)]
        axis.scatter(own[:, 1], own[:, 0], s=14, color=COLOURS[stage % len(COLOURS)], label=f"stage {stage}")
    axis.set(xlabel="longitude", ylabel="latitude", title=f"{plan.method}: {plan.cost:.2f} s")
    axis.legend(frameon=False, fontsize=6, ncols=2)


def _spread(coordinates: Any) -> Any:
    places = np.array(coordinates, np.float64)
    _, place, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    for number in np.flatnonzero(counts > 1):
        own = np.flatnonzero(place.ravel() == number)
        angle = 2 * np.pi * np.arange(len(own)) / len(own)
        places[own] += 2.0 * np.column_stack([np.sin(angle), np.cos(angle)])
    return places


def _matrix(axis: Any, plan: Placement, scenario: Scenario) -> None:
    """Bandwidth of each pair of devices, sorted by stage; the stages are coloured along the edges."""
    order = [device for stage in plan.stages for device in sorted(stage)]
    bandwidth = scenario.bandwidth[np.ix_(order, order)] / 1e9
    np.fill_diagonal(bandwidth, np.nan)
    image = axis.imshow(np.log10(bandwidth), cmap="Greys", interpolation="nearest")
    axis.grid(False)
    edges = np.cumsum([0, *(len(stage) for stage in plan.stages)]) - 0.5
    for stage, (start, end) in enumerate(pairwise(edges)):
        colour = COLOURS[stage % len(COLOURS)]
        axis.plot(
            [start, end, end, start, start], [start, start, end, end, start], color=colour, linewidth=1.4
        )
        axis.plot([-2, -2], [start, end], color=colour, linewidth=4, clip_on=False, solid_capstyle="butt")
    axis.set_xlim(-3, len(order) - 0.5)
    axis.set_xticks([])
    axis.set_yticks((edges[:-1] + edges[1:]) / 2, [f"stage {stage}" for stage in range(len(plan.stages))])
    axis.tick_params(length=0, pad=6)
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.7)
    bar.set_label("log10 of Gbit/s")
    axis.set_title(f"{plan.method}: {plan.cost:.2f} s")


def _curves(axis: Any, plans: Sequence[Placement]) -> None:
    methods = list(dict.fromkeys(plan.method for plan in plans))
    for number, method in enumerate(methods):
        label: str | None = method
        for plan in (plan for plan in plans if plan.method == method):
            seen = plan.outcome.history
            times = [max(s.seconds, 1e-4) for s in seen] + [plan.outcome.seconds]
            costs = [s.cost for s in seen] + [plan.cost]
            axis.step(
                times, costs, where="post", color=COLOURS[number % len(COLOURS)], label=label, linewidth=1.0
            )
            label = None
    axis.set(xscale="log", xlabel="seconds of search", ylabel="cost of the best so far, s")
    axis.legend(frameon=False, fontsize=7)
