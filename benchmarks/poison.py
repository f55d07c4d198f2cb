"""What attackers do to the loss: final loss with and without the defence of the average, as a table in Markdown.

20 replicas of one stage train on Python's standard library and average in random pairs; 5, 10 or 20 % of them send
poison. "naive" attackers send ten times their Δ; "tuned" ones know the defence and stay just inside the radius.
Results are appended to a file as they come, and a run goes on where it was stopped. Prints the differences to the run
without attackers, in nats per token, medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from poisoning.poisoned_stage import PoisonSetting, train_poisoned
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.simulation.attackers import KINDS, Attack

CLIP = 1.5
RESULTS = Path(__file__).parent.parent / "docs" / "data" / "poison.jsonl"
Place = tuple[str, float, float]  # attack, fraction of attackers, radius of the defence
Losses = dict[Place, list[float]]  # of each seed
PLAIN: Place = ("none", 0.0, 0.0)


@dataclass(frozen=True)
class Case:
    """A row of the table, a column of it, and the run behind that cell."""

    name: str
    fraction: float
    setting: PoisonSetting

    @property
    def key(self) -> str:
        setting = self.setting
        return (
            f"{self.name}/{self.fraction:g}/clip {setting.clip:g}/{setting.replicas} replicas/"
            f"{setting.steps} steps/k {setting.inner_steps}/seed {setting.seed}/documents"
        )


def cases_of(arguments: argparse.Namespace, clips: tuple[float, ...]) -> Iterator[Case]:
    """Seed by seed, what matters most first, so that a table cut short is of use."""
    for seed in range(arguments.seeds):
        plain = PoisonSetting(
            replicas=arguments.replicas, steps=arguments.steps, inner_steps=arguments.inner_steps, seed=seed
        )
        for clip in clips:
            yield Case("none", 0.0, replace(plain, clip=clip))
        for fraction in arguments.fractions:
            for name in arguments.attacks:
                for clip in clips:
                    yield Case(name, fraction, poisoned(plain, name, fraction, clip, arguments.clip))


def poisoned(plain: PoisonSetting, name: str, fraction: float, clip: float, tuned_to: float) -> PoisonSetting:
    kind = next(kind for kind in KINDS if name.startswith(kind))
    attack = Attack(kind, clip=tuned_to if name.endswith(", tuned") else 0.0, seed=plain.seed)
    attackers = max(1, round(fraction * plain.replicas))
    return replace(plain, attack=attack, attackers=attackers, clip=clip)


def known_results(path: Path | None) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


def losses_of(results: dict[str, dict[str, Any]], cases: list[Case]) -> Losses:
    losses: Losses = {}
    for case in cases:
        place = (case.name, case.fraction, case.setting.clip)
        losses.setdefault(place, []).append(results[case.key]["loss"])
    return losses


def added_by_attacks(losses: Losses) -> dict[str, float]:
    """What each attack adds to the loss without any, with each radius of the defence that was tried."""
    plain = _typical(losses, PLAIN)
    return {
        f"{name}_{fraction:g}_clip_{clip:g}": round(median(found) - plain, 4)
        for (name, fraction, clip), found in losses.items()
        if (name, fraction, clip) != PLAIN and not math.isnan(plain)
    }


def table(losses: Losses, clip: float) -> str:
    """Loss without attackers, and what each attack adds to it without → with the defence."""
    fractions = sorted({fraction for _, fraction, _ in losses if fraction})
    plain = _typical(losses, PLAIN)
    rows = [
        "| attack | " + " | ".join(f"{fraction:.0%}" for fraction in fractions) + " |",
        "|---" * (len(fractions) + 1) + "|",
    ]
    for name in dict.fromkeys(name for name, fraction, _ in losses if fraction):
        cells = [
            " → ".join(_added(_typical(losses, (name, fraction, side)), plain) for side in (0.0, clip))
            for fraction in fractions
        ]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    defended = _added(_typical(losses, ("none", 0.0, clip)), plain)
    return f"no attack: {plain:.4f} nats per token; the defence adds {defended}\n\n" + "\n".join(rows)


def _typical(losses: Losses, place: Place) -> float:
    return median(losses[place]) if place in losses else math.nan


def _added(loss: float, plain: float) -> str:
    return "…" if math.isnan(loss) else f"{loss - plain:+.3f}"


def main() -> None:
    parser = parser_of(__doc__)
    names = [*KINDS, *(f"{kind}, tuned" for kind in KINDS)]
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--inner-steps", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.2, 0.05])
    parser.add_argument("--attacks", nargs="+", default=names, choices=names, metavar="ATTACK")
    parser.add_argument("--clip", type=float, default=CLIP, help="radius in medians of past distances")
    parser.add_argument("--without", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--results", type=Path, default=RESULTS, help="outcomes are kept here (JSON lines)")
    arguments = arguments_of(
        parser, results=None, steps=10, replicas=4, fractions=[0.25], attacks=["sign-flip"]
    )
    report = Report("poison", arguments.json)
    if arguments.results is not None:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
    cases = list(cases_of(arguments, (0.0, arguments.clip) if arguments.without else (arguments.clip,)))
    results = known_results(arguments.results)
    for case in cases:
        if case.key in results:
            continue
        outcome = train_poisoned(case.setting)
        results[case.key] = {"key": case.key, **outcome.facts()}
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(results[case.key]) + "\n")
        report.tell(f"{case.key}: {outcome}")
    losses = losses_of(results, cases)
    report.tell(table(losses, arguments.clip))
    report.conclude(added_by_attacks(losses), [results[case.key] for case in cases])


if __name__ == "__main__":
    run(main)
