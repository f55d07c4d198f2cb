"""The work of `noloco plan`: scenario, search with a bar, tables and picture, and for the owner a signature."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bootstrap.display import figure, plain_table
from bootstrap.inspect.observer import visit
from bootstrap.lab.placement.kernels import Floats
from bootstrap.lab.placement.live_plan import (
    LiveSwarm,
    Moves,
    end_waits,
    look_at,
    moves_of,
    moves_table,
    publish_plan,
    signed_plan,
)
from bootstrap.lab.placement.noloco import NolocoProblem, Terms, Training
from bootstrap.lab.placement.pairing import mean_exchange, pairing
from bootstrap.lab.placement.plan import Placement, make_plan, problem_of
from bootstrap.lab.placement.request import PlanRequest
from bootstrap.lab.placement.scenario import Scenario, read_scenario
from bootstrap.lab.placement.search import Budget, Improvement, Problem
from node.command import run_async
from node.watch.words import print_wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATCHED = 64  # replicas of a stage, whose nearest pairs are found within seconds
RANDOM = 20  # placements, with whose median cost a plan is compared


def make_and_show(request: PlanRequest) -> None:
    """Plan as requested and show it. Raises `NolocoError` with what to do."""
    if request.begin_anew and request.publish is not None:
        run_async(_end_waits(request, request.begin_anew, request.publish))
        return
    if request.join:
        _plan_swarm(request, run_async(look_at(request.join, request.token, request.directories)))
        return
    assert request.scenario is not None
    known = read_scenario(request.scenario)
    training = Training(request.microbatches or 64, request.in_flight, request.k or 50, request.uniform)
    problem = problem_of(known, request.objective, request.stages or 8, request.replicas, training)
    _show(request, known, problem, searched(problem, request))


def _plan_swarm(request: PlanRequest, swarm: LiveSwarm) -> None:
    """Plan for a running swarm, show it, and publish it if requested.

    Raises `ScenarioError` when too little was measured, `StateError` when the key cannot be used.
    """
    known, manifest = swarm.scenario(), swarm.manifest
    training = Training(
        manifest.inner.microbatches, request.in_flight, manifest.outer.inner_steps, request.uniform
    )
    problem = problem_of(known, request.objective, manifest.stages, request.replicas, training)
    plans = searched(problem, request)
    moves = moves_of(swarm, problem, min(plans, key=lambda plan: plan.cost))
    lifetime = request.hours * 3600
    sealed = signed_plan(swarm, moves, request.publish, lifetime) if request.publish is not None else None
    _show(request, known, problem, plans, moves)
    if sealed is not None:
        run_async(
            publish_plan(request.join or [], request.token, swarm, sealed, lifetime, request.directories)
        )
        print_wrapped(
            f"The plan is signed and published; nodes follow it for {request.hours:g} h.", on_error=True
        )


async def _end_waits(request: PlanRequest, stages: Sequence[int], directory: Path) -> None:
    async with visit(request.join or [], request.token, [directory]) as observer:
        await end_waits(observer, stages, directory, request.hours * 3600)
    names = ", ".join(str(stage) for stage in stages)
    print_wrapped(
        f"Published: a node that waits for the state of stage {names} goes on within a minute, from its own "
        "checkpoint or a copy, or else begins the stage anew.",
        on_error=True,
    )


def searched(problem: Problem, request: PlanRequest) -> list[Placement]:
    """A plan for each method and seed, with a bar on a terminal."""
    budget = Budget(seconds=request.seconds)
    if request.evaluations is not None:
        budget = Budget(evaluations=request.evaluations)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[cost]}"), TimeElapsedColumn(),
        console=Console(stderr=True, markup=False), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    plans: list[Placement] = []
    with bar:
        task = bar.add_task("compiling", total=len(request.searches), cost="")
        for method, seed in request.searches:

            def advance(sighting: Improvement, search: str = f"{method}, seed {seed}") -> None:
                completed = len(plans) + min(1.0, sighting.spent)
                bar.update(task, description=search, cost=f"{sighting.cost:.3f} s", completed=completed)

            plans.append(make_plan(problem, method, budget, seed, progress=advance))
    return plans


def _show(
    request: PlanRequest,
    known: Scenario,
    problem: Problem,
    plans: list[Placement],
    moves: Moves | None = None,
) -> None:
    best = min(plans, key=lambda plan: plan.cost)
    if request.picture is not None:
        plot_plan(best, known, plans, request.picture)
    if request.as_json:
        contents = best.as_json() | {"scenario": known.name}
        if known.members:
            contents["stages"] = [known.single(clusters) for clusters in best.stages]
        if request.compare:
            contents["compared"] = compared(plans)
        print(json.dumps(contents | (moves.as_json() if moves is not None else {})))
        return
    console = Console(markup=False)
    if request.compare:
        console.print(comparison(plans), "", sep="\n")
    names = moves.names if moves is not None else ()
    console.print(stage_table(best, known, request.mixing, problem, names), "", sep="\n")
    generator = np.random.default_rng(request.seed)
    random = median(problem.cost(problem.drawn(generator)) for _ in range(RANDOM))
    console.print("\n".join(sentences(best, known, random, request.mixing)), highlight=False, markup=False)
    if moves is not None:
        console.print("", moves_table(moves), sep="\n")
        console.print(moves.sentence(), highlight=False, markup=False)


# --- tables -----------------------------------------------------------------------------------

COMPARED = {  # headings, and what stands below them
    "method": "{method}",
    "median": "{median:.3f}",
    "best": "{best:.3f}",
    "worst": "{worst:.3f}",
    "evaluations": "{evaluations:,.0f}",
    "within 1 %\nafter": "{seconds_to_1_percent:.2f} s",
    "of it,\nevaluations": "{evaluations_to_1_percent:,.0f}",
}


def stage_table(
    plan: Placement, scenario: Scenario, floor: float, problem: Problem, names: Sequence[str] = ()
) -> Table:
    """A row for each stage. `floor`: the least 1 − λ₂ of the pairing in the last column; `names`: of the devices."""
    stages = [scenario.single(devices) for devices in plan.stages]
    who = [" ".join(names[device] for device in d) if names else ranges(d) for d in stages]
    if scenario.members:  # thousands fill the screen; --json has them
        who = [f"{len(devices):,}" for devices in stages]
    columns = {
        "stage": [str(stage) for stage in range(len(plan.stages))],
        "nodes" if names else "devices": who,
    }
    if scenario.regions:
        where = [[(scenario.regions[d], len(scenario.single([d]))) for d in own] for own in plan.stages]
        counts = [Counter(chain.from_iterable(repeat(*one) for one in own)) for own in where]
        columns["where"] = [", ".join(f"{n} {region}" for region, n in sorted(c.items())) for c in counts]
    if isinstance(problem, NolocoProblem) and isinstance(plan.terms, Terms):
        columns["hop to\nthe next"] = [*(f"{hop:.3f} s" for hop in plan.terms.hops), ""]
        columns["partner,\nuniform"] = [f"{seconds:.2f} s" for seconds in plan.terms.gossip]
        if max(map(len, plan.stages)) <= MATCHED:
            times = [problem.model.gossip[np.ix_(devices, devices)] for devices in plan.stages]
            columns["partner,\nnearer"] = [f"{mean_exchange(pairing(t, floor), t):.2f} s" for t in times]
    title = f"{scenario.name}: {sum(map(len, stages)):,} devices in {len(plan.stages)} stages, {plan.method}"
    table = plain_table(title, columns, left=("devices", "nodes", "where"))
    for column in table.columns:
        column.overflow = "fold"
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def sentences(plan: Placement, scenario: Scenario, random: float, floor: float) -> list[str]:
    """Say what the tables leave out; `random` is the median cost of random placements."""
    lines = [plan.terms.sentence()]
    if isinstance(plan.terms, Terms) and max(map(len, plan.stages)) <= MATCHED:
        lines.append(
            f"partner: mean time of an exchange; nearer: pairs as near as 1 − λ₂ ≥ {floor:g} allows."
        )
    if scenario.members:
        lines.append(f"Costs are those of {scenario.devices} clusters of near devices that are alike.")
    if scenario.estimated:
        lines.append(f"{scenario.estimated} links were not measured; they were estimated from the others.")
    lines.append(
        f"A random placement costs {random:.3f} s, {random / plan.cost:.2f} times as much. "
        f"{plan.outcome.evaluations:,} placements evaluated in {plan.outcome.seconds:.1f} s; seed {plan.seed}."
    )
    return lines


def comparison(plans: Sequence[Placement]) -> Table:
    """A row for each method: costs over its seeds, and when the median seed came within 1 % of its end."""
    table = plain_table("Cost in seconds, over seeds", COMPARED, left=("method",))
    for row in compared(plans):
        table.add_row(*(cell.format(**row) for cell in COMPARED.values()))
    return table


def compared(plans: Sequence[Placement]) -> list[dict[str, float | str]]:
    """The rows of `comparison`, in the order of the median."""
    rows: list[dict[str, float | str]] = []
    for method in dict.fromkeys(plan.method for plan in plans):
        own = [plan for plan in plans if plan.method == method]
        costs = [plan.cost for plan in own]
        near = [next(s for s in p.outcome.history if s.cost <= 1.01 * p.cost) for p in own]
        rows.append(
            {
                "method": method,
                "median": median(costs),
                "best": min(costs),
                "worst": max(costs),
                "seeds": len(own),
                "evaluations": median(plan.outcome.evaluations for plan in own),
                "seconds_to_1_percent": median(sighting.seconds for sighting in near),
                "evaluations_to_1_percent": median(sighting.evaluations for sighting in near),
            }
        )
    return sorted(rows, key=lambda row: row["median"])


def ranges(devices: Sequence[int]) -> str:
    """Write numbers as ranges: "0-3 7" for 0, 1, 2, 3, 7."""
    parts = []
    # neighbours have the same distance to their rank
    for _, run in groupby(enumerate(sorted(devices)), lambda ranked: ranked[1] - ranked[0]):
        members = [device for _, device in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return " ".join(parts)


# --- the picture ------------------------------------------------------------------------------


def plot_plan(plan: Placement, scenario: Scenario, plans: Sequence[Placement], file: Path) -> None:
    """Plot `plan` on the left, the searches of `plans` on the right. Raises `UserError` when it cannot be written."""
    with figure(file, panels=2) as (left, right):
        if scenario.coordinates is not None:
            _map(left, plan, scenario)
        else:
            _matrix(left, plan, scenario)
        _curves(right, plans)


def _map(axis: Axes, plan: Placement, scenario: Scenario) -> None:
    """Draw a map: devices at one place stand in a ring; grey lines lead from stage to stage."""
    assert scenario.coordinates is not None
    places = _spread(scenario.coordinates)
    for here, there in pairwise(plan.stages):
        for a, b in zip(here, there, strict=False):
            axis.plot(places[[a, b], 1], places[[a, b], 0], color="0.85", linewidth=0.5, zorder=0)
    for stage, devices in enumerate(plan.stages):
        own = places[list(devices)]
        axis.scatter(own[:, 1], own[:, 0], s=14, color=f"C{stage}", label=f"stage {stage}")
    axis.set(xlabel="longitude", ylabel="latitude", title=f"{plan.method}: {plan.cost:.2f} s")
    axis.legend(frameon=False, fontsize=6, ncols=2)


def _spread(coordinates: Floats) -> Floats:
    places = coordinates.copy()
    _, place, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    for number in np.flatnonzero(counts > 1):
        own = np.flatnonzero(place.ravel() == number)
        angle = 2 * np.pi * np.arange(len(own)) / len(own)
        places[own] += 2.0 * np.column_stack([np.sin(angle), np.cos(angle)])
    return places


def _matrix(axis: Axes, plan: Placement, scenario: Scenario) -> None:
    """Bandwidth of each pair of devices, sorted by stage; the stages are coloured along the edges."""
    order = [device for stage in plan.stages for device in sorted(stage)]
    bandwidth = scenario.bandwidth[np.ix_(order, order)] / 1e9
    np.fill_diagonal(bandwidth, np.nan)
    image = axis.imshow(np.log10(bandwidth), cmap="Greys", interpolation="nearest")
    axis.grid(False)
    edges = np.cumsum([0, *(len(stage) for stage in plan.stages)]) - 0.5
    for stage, (start, end) in enumerate(pairwise(edges)):
        colour = f"C{stage}"
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


def _curves(axis: Axes, plans: Sequence[Placement]) -> None:
    colours: dict[str, str] = {}
    for plan in plans:
        label = None if plan.method in colours else plan.method  # one for all seeds
        colour = colours.setdefault(plan.method, f"C{len(colours)}")
        seen = plan.outcome.history
        times = [max(s.seconds, 1e-4) for s in seen] + [plan.outcome.seconds]
        costs = [s.cost for s in seen] + [plan.cost]
        axis.step(times, costs, where="post", color=colour, label=label, linewidth=1.0)
    axis.set(xscale="log", xlabel="seconds of search", ylabel="cost of the best so far, s")
    axis.legend(frameon=False, fontsize=7)
