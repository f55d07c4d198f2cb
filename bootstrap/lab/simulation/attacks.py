"""Trials of what attackers do to a swarm that trains, and of what the honest find out about them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from bootstrap.lab.simulation.learning import LearningResult, LearningSetting
from bootstrap.lab.simulation.study import grouped, interval, run_study

NOBODY = "nobody"
# An inner step of tiny then takes about a second, as on volunteers' machines. In steps of 50 ms whatever waits by the
# clock, as for the first answer of a peer that may still compile, lasts for a tenth of a run of 200 steps.
WORK = 20.0


def attack_settings(
    undisturbed: Sequence[LearningSetting], attacks: Sequence[str], shares: Sequence[float]
) -> Iterator[LearningSetting]:
    """The settings in steps of a second, then with each kind of attacker and each share of them."""
    slower = [replace(setting, work=WORK) for setting in undisturbed]
    yield from slower
    for attack, share, setting in product(attacks, shares, slower):
        yield replace(setting, attack=attack, attackers=share)


def run_and_show_attacks(
    settings: Sequence[LearningSetting], results: Path | None, jobs: int, as_json: bool
) -> None:
    """Run the trials and show them, resuming from the outcomes in `results`. Raises `NolocoError`."""
    console = Console(stderr=True, markup=False)

    def tell(outcome: LearningResult, done: int, total: int) -> None:
        console.print(
            f"{done}/{total}  {_who(outcome)} seed {outcome.setting['seed']}: loss {outcome.loss:.3f}, found "
            f"{_found(outcome.found)} ({outcome.wall_seconds:.0f} s)",
            highlight=False,
        )

    outcomes = attack_rows(run_study(settings, results, jobs, tell))
    if as_json:
        print(json.dumps({"simulation": "attacks", "results": outcomes}, indent=2))
    else:
        Console(markup=False).print(_table_of(outcomes))


def attack_rows(outcomes: Sequence[LearningResult]) -> list[dict[str, object]]:
    """One row for each kind and share, over its seeds; `harm` in nats per token by those where nobody attacks."""
    undisturbed = {o.setting["seed"]: o.loss for o in outcomes if "attack" not in o.setting}
    rows = []
    for group in grouped(outcomes):
        harms = [o.loss - undisturbed[o.setting["seed"]] for o in group if o.setting["seed"] in undisturbed]
        found = [o.found for o in group if o.found is not None]
        delays = [o.found_after for o in group if o.found_after is not None]
        first = group[0].setting
        rows.append(
            {
                "attack": first.get("attack", NOBODY),
                "attackers": first.get("attackers", 0.0),
                "loss": round(mean(o.loss for o in group), 4),
                "harm": round(mean(harms), 4) if "attack" in first and harms else None,
                "harm_interval": interval(harms) if "attack" in first else None,
                "worst": round(max(harms), 4) if "attack" in first and harms else None,
                "found": round(mean(found), 3) if found else None,
                "microbatches_until_found": round(mean(delays)) if delays else None,
                "honest_set_aside": sum(o.blamed for o in group),
                "seeds": len(group),
            }
        )
    return rows


def _table_of(rows: Sequence[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("attack", no_wrap=True)
    for name in (
        "of a stage", "loss", "harm", "worst", "found", "after\nmicrobatches", "honest\nset aside", "seeds"
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        harm, half = row["harm"], row["harm_interval"]
        table.add_row(
            str(row["attack"]),
            f"{row['attackers']:.0%}",
            f"{row['loss']:.3f}",
            "" if harm is None else f"{harm:+.3f}" + ("" if half is None else f" ± {half:.3f}"),
            "" if row["worst"] is None else f"{row['worst']:+.3f}",
            _found(row["found"]),
            "" if row["microbatches_until_found"] is None else str(row["microbatches_until_found"]),
            str(row["honest_set_aside"]),
            str(row["seeds"]),
        )
    return table


def _who(outcome: LearningResult) -> str:
    facts = outcome.setting
    return f"{facts['attackers']:.0%} {facts['attack']}" if "attack" in facts else NOBODY


def _found(share: object) -> str:
    return "" if share is None else f"{share:.0%}"
