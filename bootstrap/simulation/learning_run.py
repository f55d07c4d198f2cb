"""What `noloco simulate learning` does: run every combination of settings, draw them, show them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from bootstrap.creating.choosing import RunOptions
from bootstrap.display import figure
from bootstrap.simulation.learning import LearningResult, LearningSetting
from bootstrap.simulation.study import grouped, one_setting, rows, run_study, varied
from protocol.errors import ManifestError
from protocol.manifest import BoundaryCodec, Manifest

SHOWN = {  # how columns are called in the table
    "learning_rate": "lr",
    "microbatches": "micro-\nbatches",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
}
METHODS = ("noloco", "diloco", "average", "local", "all-reduce")


# --- lists as text ------------------------------------------------------------------------------


def numbers(option: str, text: str, kind: type[int] | type[float], least: float) -> list[Any]:
    """The numbers of a list as 4,8. Raises `ManifestError` that names the option."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or any(not least <= value < 1e9 for value in values):
        what = "whole numbers" if kind is int else "numbers"
        raise ManifestError(f"{option} {text!r}: give {what} of at least {least}, separated by commas.")
    return values


def choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    values = text.split(",")
    for value in values:
        if value not in known:
            raise ManifestError(f"{option} {value!r}: choose from {', '.join(known)}.")
    return values


def wires(option: str, text: str) -> list[dict[str, str]]:
    """The manifest's changes for a list of codecs as fp32,int8/bf16: of both directions, or activations/gradients."""
    known, result = get_args(BoundaryCodec), []
    for part in text.split(","):
        activations, _, gradients = part.partition("/")
        for codec in (activations, gradients or activations):
            choices(option, codec, known)
        result.append({"activations": activations, "gradients": gradients or activations})
    return result


def seconds(option: str, text: str) -> list[float]:
    """The durations of a list in milliseconds."""
    return [milliseconds / 1000 for milliseconds in numbers(option, text, float, 0)]


READERS: dict[str, Callable[[str], list[Any]]] = {  # of the list that each option takes
    "method": partial(choices, "--method", known=METHODS),
    "replicas": partial(numbers, "--replicas", kind=int, least=1),
    "stages": partial(numbers, "--stages", kind=int, least=1),
    "routing": partial(choices, "--routing", known=("random", "fixed")),
    "inner_steps": partial(numbers, "-k", kind=int, least=1),
    "alpha": partial(numbers, "--alpha", kind=float, least=0),
    "beta": partial(numbers, "--beta", kind=float, least=0),
    "gamma": partial(numbers, "--gamma", kind=float, least=0),
    "overlap": partial(choices, "--overlap", known=("none", "phi-early")),
    "staleness": partial(numbers, "--staleness", kind=int, least=0),
    "wire": partial(wires, "--codecs"),
    "slow": partial(numbers, "--slow", kind=float, least=1),
    "latency": partial(seconds, "--latency"),
    "mbit": partial(numbers, "--mbit", kind=float, least=0),
    "seed": partial(numbers, "--seeds", kind=int, least=0),
}


def combinations(base: Manifest, asked: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """Arguments of `one_setting`: every combination of the lists in `asked`; without a list it stays as in `base`.

    Raises `ManifestError`.
    """
    lists = {name: READERS[name](text) for name, text in asked.items() if text is not None}
    lists.setdefault("staleness", [base.inner.staleness])
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


# --- the command --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """What was asked for, lists as text."""

    preset: str | None
    manifest: Path | None
    asked: Mapping[str, str | None]
    steps: int
    microbatches: int
    sequences: int
    validation_sequences: int

    def settings(self) -> list[LearningSetting]:
        """Raises `NolocoError` for what cannot be run."""
        base, _ = RunOptions(self.preset, self.manifest).resolved()
        return [
            one_setting(
                base,
                self.steps,
                self.microbatches,
                self.sequences,
                validation_sequences=self.validation_sequences,
                **chosen,
            )
            for chosen in combinations(base, self.asked)
        ]


def run_and_show(study: Study, jobs: int, results: Path | None, plot: Path | None, as_json: bool) -> None:
    """Goes on from the outcomes in `results`. Raises `NolocoError` with what to do."""
    console = Console(stderr=True)
    outcomes = run_study(study.settings(), results, jobs, lambda o, done, of: tell(console, o, done, of))
    if plot is not None:
        plot_learning(outcomes, plot)
    if as_json:
        print(json.dumps({"simulation": "learning", "results": rows(outcomes)}, indent=2))
    else:
        Console().print(table_of(outcomes))


def tell(console: Console, outcome: LearningResult, done: int, total: int) -> None:
    facts = outcome.setting
    console.print(
        f"{done}/{total}  {facts['method']} {facts['replicas']} × {facts['stages']} k={facts['k']} "
        f"{facts['activations']}/{facts['gradients']} seed {facts['seed']}: "
        f"loss {outcome.loss:.3f}, spread {outcome.spread:.1e} ({outcome.wall_seconds:.0f} s)",
        highlight=False,
    )


def table_of(outcomes: Sequence[LearningResult]) -> Table:
    """A row for each setting: what distinguishes it, then what came of it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = varied(outcomes)
    for name in columns:
        table.add_column(SHOWN.get(name, name))
    for name in ("loss", "by seed", "mean's", "spread", "bytes/\ntoken", "rounds", "paired", "blocked"):
        table.add_column(name, justify="right")
    for row in rows(outcomes):
        table.add_row(
            *(f"{row[name]:g}" if isinstance(row[name], float) else str(row[name]) for name in columns),
            f"{row['loss']:.3f}",
            " ".join(f"{loss:.3f}" for loss in row["loss_by_seed"].values()),
            f"{row['loss_of_mean']:.3f}",
            f"{row['spread']:.1e}",
            f"{row['bytes_per_token']:.1f}",
            f"{row['rounds']:.0f}",
            f"{row['paired']:.0%}",
            f"{row['blocked']:.1%}",
        )
    return table


def plot_learning(outcomes: Sequence[LearningResult], file: Path) -> None:
    """Validation loss and replica spread against tokens; one line for each setting, its first seed."""
    columns = varied(outcomes) or ["method"]
    with figure(file, panels=2) as (losses, spreads):
        for group in grouped(outcomes):
            first = group[0]
            label = ", ".join(f"{name} {first.setting[name]}" for name in columns)
            tokens = [point[0] / 1e6 for point in first.curve]
            losses.plot(tokens, [point[1] for point in first.curve], label=label, linewidth=1.2)
            if any(point[2] > 0 for point in first.curve):
                spreads.plot(tokens, [point[2] for point in first.curve], label=label, linewidth=1.2)
        losses.set(xlabel="million tokens", ylabel="validation loss, nats per token")
        spreads.set(xlabel="million tokens", ylabel="replica spread", yscale="log")
        losses.legend(frameon=False, fontsize=7)
