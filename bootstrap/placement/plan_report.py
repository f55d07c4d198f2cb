"""What `noloco plan` shows: the stages of a plan, the terms of its cost, methods side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from rich.table import Table

from bootstrap.placement import dtfm
from bootstrap.placement.dtfm import DtfmProblem
from bootstrap.placement.noloco import NolocoProblem, Terms
from bootstrap.placement.pairing import pairing
from bootstrap.placement.plan import Placement
from bootstrap.placement.scenario import Scenario


def stage_table(
    plan: Placement, scenario: Scenario, floor: float, problem: DtfmProblem | NolocoProblem
) -> Table:
    """A row for each stage. `floor`: of 1 − λ₂, for the pairing that NoLoCo's rows tell of."""
    table = _table(f"{scenario.name}: {scenario.devices} devices in {len(plan.stages)} stages, {plan.method}")
    for heading in ("stage", "devices"):
        table.add_column(heading, justify="right" if heading == "stage" else "left", overflow="fold")
    if scenario.regions:
        table.add_column("where", overflow="fold")
    is_noloco = isinstance(problem, NolocoProblem) and isinstance(plan.terms, Terms)
    if is_noloco:
        for heading in ("hop to\nthe next", "partner,\nuniform", "partner,\nnearer"):
            table.add_column(heading, justify="right")
    for stage, devices in enumerate(plan.stages):
        row = [str(stage), ranges(devices)]
        if scenario.regions:
            row.append(places([scenario.regions[device] for device in devices]))
        if isinstance(problem, NolocoProblem) and isinstance(plan.terms, Terms):
            hops, gossip = plan.terms.hops, plan.terms.gossip
            near = pairing(problem.model.gossip[list(devices)][:, list(devices)], floor)
            row += [f"{hops[stage]:.3f} s" if stage < len(hops) else "", f"{gossip[stage]:.2f} s"]
            row.append(f"{near.seconds:.2f} s")
        table.add_row(*row)
    return table


def sentences(plan: Placement, scenario: Scenario, random: float, floor: float) -> list[str]:
    """`random`: median cost of random placements."""
    terms, outcome = plan.terms, plan.outcome
    if isinstance(terms, dtfm.DtfmCost):
        lines = [
            f"COMM {terms.total:.3f} s: data parallelism {terms.parallel:.3f} s, pipeline {terms.pipeline:.3f} s."
        ]
    else:
        lines = [
            f"A step takes {terms.step:.3f} s: a microbatch there and back {terms.latency:.3f} s, then one every "
            f"{terms.bottleneck * 1000:.1f} ms at most ({terms.busiest} is the busiest); "
            f"{terms.throughput:.1f} microbatches a second in the steady state.",
            f"partner: mean time of an exchange; nearer: pairs as near as 1 − λ₂ ≥ {floor:g} allows.",
        ]
    if scenario.estimated:
        lines.append(f"{scenario.estimated} links were not measured; they were estimated from the others.")
    lines.append(
        f"A random placement costs {random:.3f} s, {random / plan.cost:.2f} times as much. "
        f"{outcome.evaluations:,} placements evaluated in {outcome.seconds:.1f} s; seed {plan.seed}."
    )
    return lines


def comparison(plans: Sequence[Placement]) -> Table:
    """A row for each method: costs over its seeds, and when the median seed came within 1 % of its end."""
    table = _table("Cost in seconds, over seeds")
    for heading in (
        "method",
        "median",
        "best",
        "worst",
        "evaluations",
        "within 1 %\nafter",
        "of it,\nevaluations",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in compared(plans):
        table.add_row(
            str(row["method"]),
            *(f"{row[name]:.3f}" for name in ("median", "best", "worst")),
            f"{row['evaluations']:,.0f}",
            f"{row['seconds_to_1_percent']:.2f} s",
            f"{row['evaluations_to_1_percent']:,.0f}",
        )
    return table


def compared(plans: Sequence[Placement]) -> list[dict[str, float | str]]:
    """The rows of `comparison`, in the order of the median."""
    rows: list[dict[str, float | str]] = []
    for method in dict.fromkeys(plan.method for plan in plans):
        own = [plan for plan in plans if plan.method == method]
        near = [next(s for s in p.outcome.history if s.cost <= 1.01 * p.cost) for p in own]
        rows.append(
            {
                "method": method,
                "median": median(plan.cost for plan in own),
                "best": min(plan.cost for plan in own),
                "worst": max(plan.cost for plan in own),
                "seeds": len(own),
                "evaluations": median(plan.outcome.evaluations for plan in own),
                "seconds_to_1_percent": median(sighting.seconds for sighting in near),
                "evaluations_to_1_percent": median(sighting.evaluations for sighting in near),
            }
        )
    return sorted(rows, key=lambda row: row["median"])


def ranges(devices: Sequence[int]) -> str:
    """ "0-3 7" for 0, 1, 2, 3, 7."""
    parts: list[str] = []
    ordered = sorted(devices)
    start = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            first, last = ordered[start], ordered[place - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = place
    return " ".join(parts)


def places(regions: Sequence[str]) -> str:
    """ "4 Ohio, 4 Oregon"."""
    return ", ".join(f"{count} {region}" for region, count in sorted(Counter(regions).items()))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="underline")
