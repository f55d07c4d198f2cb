"""The front: the lowest loss for the bytes that links allow. Validation loss against bytes per token.

A study over k, method, α, β, γ, codec and overlap, each point a whole simulated run (see
`bootstrap.lab.simulation.learning`). It keeps every outcome in a file and goes on from there when it is stopped;
docs/notebook/learning.md shows its table and picture. Prints `loss_gap_at_a_tenth`: how far the best setting with at
most a tenth of all-reduce's bytes is above all-reduce's loss, in nats.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean
from typing import Any

from pipelines.published import PUBLISHED, tiny_with_adamw
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.checking.front import FrontPoint
from bootstrap.display import figure
from bootstrap.lab.simulation.learning import LearningResult, LearningSetting
from bootstrap.lab.simulation.study import grouped, one_setting, rows, run_study

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "data" / "front.jsonl"
CITED = ROOT / "bootstrap" / "checking" / "front.json"
REPLICAS, STEPS, SEQUENCES = 4, 1000, 2
TENTH = 0.1

INT8 = {"gossip": "int8"}
MEAN = {"method": "noloco", "alpha": 0.0, "beta": 1.0, "gamma": 1.0}  # pairs take their plain mean
# what each point changes of the published settings
POINTS: Sequence[dict[str, Any]] = (
    {"method": "all-reduce"},
    {"method": "local", "inner_steps": 25},
    *({**MEAN, "inner_steps": k, "wire": INT8} for k in (2, 3, 5, 10, 25)),
    *({**MEAN, "inner_steps": k} for k in (1, 2, 5, 10, 25, 50)),
    *({"method": "noloco", "inner_steps": k} for k in (2, 5, 25, 50)),
    *({"method": "diloco", "inner_steps": k} for k in (25, 50)),
    {"method": "diloco", "inner_steps": 25, "alpha": 0.3},
    *({"method": "diloco", "inner_steps": k, "alpha": 0.0, "beta": 1.0, "gamma": 1.0} for k in (5, 25)),
    *(
        {
            **MEAN,
            "inner_steps": 2,
            "wire": INT8,
            "inner": {"learning_rate": rate, "min_learning_rate": rate / 10},
        }
        for rate in (3e-3, 4e-3)
    ),
    {"method": "all-reduce", "inner": {"learning_rate": 3e-3, "min_learning_rate": 3e-4}},
    {**MEAN, "inner_steps": 2, "overlap": "phi-early", "wire": INT8 | {"progress": "int8"}},
    {"method": "noloco", "inner_steps": 25, "alpha": 0.3, "gamma": 0.9},
    {"method": "noloco", "inner_steps": 25, "overlap": "phi-early", "wire": {"progress": "int8"}},
)


def settings(seeds: Sequence[int], steps: int, points: int) -> Iterator[LearningSetting]:
    base = tiny_with_adamw()
    for seed in seeds:
        for point in POINTS[:points]:
            yield one_setting(
                base, steps, 1, SEQUENCES, stages=1, replicas=REPLICAS, seed=seed, **(PUBLISHED | point)
            )


def front(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Those that no other beats in both loss and bytes per token, by bytes."""
    best: list[FrontPoint] = []
    for point in sorted(points, key=lambda point: (point.bytes_per_token, point.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="outcomes are kept here (JSON lines)")
    parser.add_argument("--seeds", default="0", help="as 0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--points", type=int, default=len(POINTS), help="the first so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--plot", type=Path, help="SVG of loss against bytes per token")
    parser.add_argument("--cite", action="store_true", help="keep the points for `noloco manifest check`")
    arguments = arguments_of(parser, results=None, steps=5, points=2, jobs=1)
    report, seeds = Report("front", arguments.json), [int(seed) for seed in arguments.seeds.split(",")]
    wanted = list(settings(seeds, arguments.steps, arguments.points))
    if arguments.results is not None:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)

    def told(outcome: LearningResult, done: int, total: int) -> None:
        report.tell(
            f"{done}/{total}  {outcome.setting['method']} k={outcome.setting['k']} "
            f"seed {outcome.setting['seed']}: {outcome.loss:.3f} ({outcome.wall_seconds:.0f} s)"
        )

    outcomes = run_study(wanted, arguments.results, arguments.jobs, told)
    points = points_of(outcomes)
    if arguments.plot is not None:
        plot(points, arguments.plot)
    if arguments.cite:
        write_points(points)
    gap, winner = gap_at_a_tenth(points)
    report.tell(markdown(points))
    report.tell(f"\nAt most a tenth of all-reduce's bytes: {winner.name}, {gap:+.3f} nats from all-reduce.")
    report.conclude({"loss_gap_at_a_tenth": round(gap, 4)}, rows(outcomes))


def write_points(points: Sequence[FrontPoint]) -> None:
    """Into the package, one point a line."""
    lines = ",\n".join(json.dumps(asdict(point), ensure_ascii=False) for point in points)
    CITED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def gap_at_a_tenth(points: Sequence[FrontPoint]) -> tuple[float, FrontPoint]:
    """The smallest loss above all-reduce's with at most a tenth of its bytes, and its point."""
    reference = next(point for point in points if point.method == "all-reduce")
    best = min((point for point in points if point.share <= TENTH), key=lambda point: point.loss)
    return best.loss - reference.loss, best


def points_of(outcomes: Sequence[LearningResult]) -> list[FrontPoint]:
    """One for each setting; all-reduce must be among them."""
    reference = next(outcome for outcome in outcomes if outcome.setting["method"] == "all-reduce")
    settings = {field.name for field in fields(FrontPoint)}
    return [
        FrontPoint(
            **{name: value for name, value in group[0].setting.items() if name in settings},
            seeds=len(group),
            loss=round(mean(outcome.loss for outcome in group), 4),
            spread=round(mean(outcome.spread for outcome in group), 7),
            bytes_per_token=round(mean(outcome.bytes_per_token for outcome in group), 1),
            share=round(mean(o.bytes_per_replica for o in group) / reference.bytes_per_replica, 4),
        )
        for group in grouped(outcomes)
    ]


def markdown(points: Sequence[FrontPoint]) -> str:
    """A table sorted by bytes; the front's members are marked."""
    lines = [
        "| setting | seeds | loss | spread | bytes/token | of all-reduce's | front |",
        "|---|---|---|---|---|---|---|",
    ]
    on_front = front(points)
    for point in sorted(points, key=lambda point: -point.bytes_per_token):
        lines.append(
            f"| {point.name} | {point.seeds} | {point.loss:.3f} | {point.spread:.1e} "
            f"| {point.bytes_per_token:,.0f} | {point.share:.1%} | {'●' if point in on_front else ''} |"
        )
    return "\n".join(lines)


def plot(points: Sequence[FrontPoint], file: Path) -> None:
    with figure(file) as (axis,):
        for method in dict.fromkeys(point.method for point in points):
            own = [point for point in points if point.method == method]
            axis.scatter(
                [max(point.bytes_per_token, 1.0) for point in own],
                [point.loss for point in own],
                s=18,
                label=method,
            )
        line = front(points)
        axis.plot(
            [max(point.bytes_per_token, 1.0) for point in line],
            [point.loss for point in line],
            color="grey",
            linewidth=0.8,
            zorder=0,
        )
        for point in line:
            place = (max(point.bytes_per_token, 1.0), point.loss)
            axis.annotate(point.name, place, fontsize=6, xytext=(3, 3), textcoords="offset points")
        axis.set(
            xscale="log",
            xlabel="bytes sent per token trained, by one replica",
            ylabel="validation loss, nats per token",
        )
        axis.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    run(main)
