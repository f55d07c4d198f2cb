"""The front: the lowest loss for the bytes that links allow. Validation loss against bytes per token.

A study over k, method, α, β, γ, codec and overlap, each point a whole simulated run (see
`bootstrap.simulation.learning`). It keeps every outcome in a file and goes on from there when it is stopped;
docs/learning.md shows its table and picture. Prints `loss_gap_at_a_tenth`: how far the best setting with at most
a tenth of all-reduce's bytes is above all-reduce's loss, in nats.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bootstrap.simulation.figure import figure
from bootstrap.simulation.learning import Outcome, Setting
from bootstrap.simulation.learning_cli import one_setting
from bootstrap.simulation.study import grouped, rows, run_study
from protocol.manifest import load_preset

RESULTS = Path(__file__).parent.parent / "docs" / "data" / "front.jsonl"
REPLICAS, STEPS, SEQUENCES = 4, 1000, 2
TENTH = 0.1

INT8 = {"gossip": "int8"}
# what each point changes of the preset's settings
POINTS: Sequence[dict[str, Any]] = (
    {"method": "all-reduce"},
    {"method": "local", "inner_steps": 25},
    *({"method": "noloco", "inner_steps": k} for k in (1, 2, 5, 10, 25, 50)),
    *({"method": "diloco", "inner_steps": k} for k in (1, 5, 25, 50)),
    *({"method": "average", "inner_steps": k} for k in (1, 2, 5, 10, 25)),
    *({"method": "average", "inner_steps": k, "wire": INT8} for k in (1, 2, 3, 5)),
    {"method": "diloco", "inner_steps": 25, "alpha": 0.0, "beta": 1.0, "gamma": 1.0},
    {"method": "noloco", "inner_steps": 25, "alpha": 0.3, "gamma": 0.9},
    {"method": "noloco", "inner_steps": 25, "overlap": "late"},
    {"method": "noloco", "inner_steps": 25, "overlap": "phi-early", "wire": {"progress": "int8"}},
)


def settings(seeds: Sequence[int]) -> Iterator[Setting]:
    base = load_preset("tiny")
    for seed in seeds:
        for point in POINTS:
            yield one_setting(base, STEPS, 1, SEQUENCES, stages=1, replicas=REPLICAS, seed=seed, **point)


def front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that no other beats in both loss and bytes per token, by bytes."""
    best: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda o: (o.bytes_per_token, o.loss)):
        if not best or outcome.loss < best[-1].loss:
            best.append(outcome)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="outcomes are kept here (JSON lines)")
    parser.add_argument("--seeds", default="0", help="as 0,1,2")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--plot", type=Path, help="SVG of loss against bytes per token")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted = list(settings([int(seed) for seed in arguments.seeds.split(",")]))
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    outcomes = run_study(wanted, arguments.results, arguments.jobs, tell)
    if arguments.plot is not None:
        plot(outcomes, arguments.plot)
    gap, winner = gap_at_a_tenth(outcomes)
    table = rows(outcomes)
    if arguments.json:
        ratios = {"loss_gap_at_a_tenth": round(gap, 4)}
        print(json.dumps({"benchmark": "front", "ratios": ratios, "results": table}, indent=2))
        return
    print(markdown(outcomes))
    print(f"\nAt most a tenth of all-reduce's bytes: {name_of(winner)}, {gap:+.3f} nats from all-reduce.")


def gap_at_a_tenth(outcomes: Sequence[Outcome]) -> tuple[float, Outcome]:
    """The smallest mean loss above all-reduce's with at most a tenth of its bytes, and an outcome of it."""
    groups = grouped(outcomes)
    reference = next(group for group in groups if group[0].setting["method"] == "all-reduce")
    allowed = TENTH * reference[0].bytes_per_replica
    cheap = [group for group in groups if group[0].bytes_per_replica <= allowed]
    best = min(cheap, key=mean_loss)
    return mean_loss(best) - mean_loss(reference), best[0]


def mean_loss(group: Sequence[Outcome]) -> float:
    return sum(outcome.loss for outcome in group) / len(group)


def name_of(outcome: Outcome) -> str:
    """Method, k, and whatever is not as in the preset."""
    facts, usual = outcome.setting, load_preset("tiny")
    parts = [facts["method"]]
    if facts["method"] != "all-reduce":
        parts.append(f"k={facts['k']}")
    outer, inner = usual.outer, usual.inner
    if facts["method"] in ("noloco", "diloco"):
        for symbol, key in (("α", "alpha"), ("β", "beta"), ("γ", "gamma")):
            if facts[key] != getattr(outer, key):
                parts.append(f"{symbol}={facts[key]:g}")
    if facts["learning_rate"] != inner.learning_rate:
        parts.append(f"lr={facts['learning_rate']:g}")
    if facts["overlap"] != "none":
        parts.append(facts["overlap"])
    if facts["gossip"] != "fp32":
        parts.append(f"z {facts['gossip']}")
    if facts["overlap"] == "phi-early" and facts["progress"] != "fp32":
        parts.append(f"Δ {facts['progress']}")
    return " ".join(parts)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A table sorted by bytes; the front's members are marked."""
    best = {outcome.key for outcome in front([group[0] for group in grouped(outcomes)])}
    reference = next((o for o in outcomes if o.setting["method"] == "all-reduce"), None)
    lines = [
        "| setting | seeds | loss | spread | bytes/token | of all-reduce's | blocked | front |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in sorted(grouped(outcomes), key=lambda group: -group[0].bytes_per_token):
        first = group[0]
        share = f"{first.bytes_per_replica / reference.bytes_per_replica:.1%}" if reference else ""
        losses = " ".join(f"{outcome.loss:.3f}" for outcome in group)
        spread = sum(outcome.spread for outcome in group) / len(group)
        lines.append(
            f"| {name_of(first)} | {len(group)} | {losses} | {spread:.1e} | {first.bytes_per_token:,.1f} "
            f"| {share} | {first.blocked:.1%} | {'●' if first.key in best else ''} |"
        )
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    with figure(file) as axis:
        methods = dict.fromkeys(outcome.setting["method"] for outcome in outcomes)
        for method in methods:
            own = [group[0] for group in grouped(outcomes) if group[0].setting["method"] == method]
            bytes_per_token = [max(outcome.bytes_per_token, 1.0) for outcome in own]
            axis.scatter(bytes_per_token, [outcome.loss for outcome in own], s=18, label=method)
        line = front([group[0] for group in grouped(outcomes)])
        axis.plot(
            [max(outcome.bytes_per_token, 1.0) for outcome in line],
            [outcome.loss for outcome in line],
            color="grey",
            linewidth=0.8,
            zorder=0,
        )
        for outcome in line:
            place = (max(outcome.bytes_per_token, 1.0), outcome.loss)
            axis.annotate(name_of(outcome), place, fontsize=6, xytext=(3, 3), textcoords="offset points")
        axis.set(
            xscale="log",
            xlabel="bytes sent per token trained, by one replica",
            ylabel="validation loss, nats per token",
        )
        axis.legend(frameon=False, fontsize=7)


def tell(outcome: Outcome, done: int, total: int) -> None:
    print(
        f"{done}/{total}  {name_of(outcome)}: {outcome.loss:.3f} ({outcome.wall_seconds:.0f} s)", flush=True
    )


if __name__ == "__main__":
    main()
