"""Studies of many settings: several run at a time, each outcome is kept at once, and all are shown side by side."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, stdev
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit

from bootstrap.display import figure
from bootstrap.lab.simulation.effective import AllReduceCurves
from bootstrap.lab.simulation.learning import LearningResult, LearningSetting, simulate, simulate_aloud
from node.machine.named import is_there, shown, unreadable
from protocol.codecs.near_codecs import BITS
from protocol.errors import DataError
from protocol.files.keeping import descriptor_of
from protocol.run.manifest import Manifest, manifest_from
from protocol.windows import amount

Item = TypeVar("Item")
Result = TypeVar("Result")
OnOutcome = Callable[[LearningResult, int, int], None]  # outcome, how many are done, how many there are

SHOWN = {  # how facts are called in the table
    "learning_rate": "lr",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
}


def one_setting(
    base: Manifest,
    steps: int,
    microbatches: int,
    sequences: int,
    *,
    method: str = "noloco",
    replicas: int = 4,
    stages: int = 2,
    routing: str = "random",
    seed: int = 0,
    slow: float = 1.0,
    latency: float = 0.0,
    mbit: float = 0.0,
    validation_sequences: int = 512,
    staleness: int = 0,
    wire: Mapping[str, object] | None = None,
    inner: Mapping[str, object] | None = None,
    chosen: Mapping[str, object] | None = None,
    **outer: object,
) -> LearningSetting:
    """Make a setting of `base` with changes, validated; `seed` draws the first weights, too.

    `chosen` has further settings of the manifest by name, as outer.clip; they count last. A method that cannot use
    the base's gossip codec has int8, unless another is chosen, and one that cannot have its outer.gain or
    outer.fragments has none.
    Raises `ManifestError` for settings that contradict each other.
    """
    contents = base.model_dump()
    if method != "all-reduce":
        outer["method"] = method
    if base.wire.gossip in BITS and not base.outer.model_copy(update=outer).sends_whole_weights:
        contents["wire"]["gossip"] = "int8"
    contents["stages"], contents["routing"] = stages, routing
    contents["inner"].update(
        total_steps=steps,
        warmup_steps=min(contents["inner"]["warmup_steps"], steps - 1),
        microbatches=microbatches,
        sequences=sequences,
        staleness=staleness,
        **(inner or {}),
    )
    contents["wire"].update(wire or {})
    contents["outer"].update(outer)
    # the base's, which these cannot have
    is_noloco, has_overlap = contents["outer"]["method"] == "noloco", contents["outer"]["overlap"] != "none"
    if has_overlap or not is_noloco:
        contents["outer"].pop("gain", None)
    is_mean = contents["outer"]["method"] == "average" or (is_noloco and not contents["outer"]["alpha"])
    if has_overlap or not is_mean:
        contents["outer"].pop("fragments", None)
    contents["model"]["seed"] += seed
    for name, value in (chosen or {}).items():
        section, _, setting = name.rpartition(".")
        (contents.setdefault(section, {}) if section else contents)[setting] = value
    if contents["inner"]["optimizer"] == "adamw" and "inner.muon_learning_rate" not in (chosen or {}):
        contents["inner"]["muon_learning_rate"] = None  # the base's, which may have Muon
    return LearningSetting(
        manifest_from(contents),
        replicas,
        seed,
        method == "all-reduce",
        slow,
        latency,
        mbit,
        validation_sequences,
        tuple(chosen or ()),
    )


# --- running ------------------------------------------------------------------------------------


def run_study(
    settings: Sequence[LearningSetting],
    file: Path | None,
    jobs: int,
    on_outcome: OnOutcome,
    work: Callable[[LearningSetting], LearningResult] = simulate,
) -> list[LearningResult]:
    """Outcomes in the order of `settings`. Those already in `file` (JSON lines) are not run again.

    Each new one is appended to it at once, so a study can be stopped and resumed. Raises
    `DataError` for a file that holds something else.
    """
    known = {outcome.key: outcome for outcome in read_outcomes(file)} if file is not None else {}
    wanted = {setting.key: setting for setting in settings}
    missing = [setting for key, setting in wanted.items() if key not in known]
    for done, outcome in enumerate(as_they_end(work, missing, jobs), start=len(wanted) - len(missing) + 1):
        known[outcome.key] = outcome
        if file is not None:
            with os.fdopen(descriptor_of(file), "a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
        on_outcome(outcome, done, len(wanted))
    return [known[setting.key] for setting in settings]


def read_outcomes(file: Path) -> list[LearningResult]:
    """The outcomes in a file of a study; none when there is no file yet."""
    if not is_there(file, DataError):
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise unreadable(file, error, DataError) from None
    except UnicodeDecodeError:
        raise DataError(f"{shown(file)} is not UTF-8 text. Name another file with --results.") from None
    names = {field.name for field in fields(LearningResult)}
    outcomes = []
    for number, line in enumerate(lines, start=1):
        try:
            contents = json.loads(line)
            outcome = LearningResult(**{name: contents[name] for name in names if name in contents})
            outcome.curve = [(tokens, loss, spread) for tokens, loss, spread in outcome.curve]
            outcomes.append(outcome)
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{file}, line {number}, is not an outcome of this version's study. "
                "Name another file, or remove that line."
            ) from None
    return outcomes


def as_they_end(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """Yield `work` of each item, in the order in which they end; `jobs` processes at a time.

    With one job all is done in this process, in the order of the items. `work`, items and results are pickled
    otherwise. An error of `work` comes out here. Nothing further begins after that or when the iterator is
    closed, and that waits for what is under way.
    """
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(min(jobs, len(items)), mp_context=multiprocessing.get_context("spawn"))
    try:
        for future in as_completed([pool.submit(work, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


# --- showing ------------------------------------------------------------------------------------


def run_and_show(
    settings: Sequence[LearningSetting],
    results: Path | None,
    jobs: int,
    plot: Path | None,
    as_json: bool,
    same_bytes: bool = False,
) -> None:
    """Run a study and show it, resuming from the outcomes in `results`. Raises `NolocoError` with what to do.

    With `same_bytes` also show the loss of each where it had sent as many bytes as the one that sends fewest.
    """
    console = Console(stderr=True, markup=False)

    def tell(outcome: LearningResult, done: int, total: int) -> None:
        facts = outcome.setting
        chosen = "".join(
            f" {name.rpartition('.')[2]}={value}" for name, value in facts.items() if "." in name
        )
        console.print(
            f"{done}/{total}  {facts['method']} {facts['replicas']} × {facts['stages']} k={facts['k']} "
            f"{facts['activations']}/{facts['gradients']}{chosen} seed {facts['seed']}: "
            f"loss {outcome.loss:.3f}, spread {outcome.spread:.1e} ({outcome.wall_seconds:.0f} s)",
            highlight=False,
        )

    outcomes = run_study(settings, results, jobs, tell, simulate_aloud)
    if plot is not None:
        plot_learning(outcomes, plot)
    if as_json:
        result: dict[str, object] = {"simulation": "learning", "results": rows(outcomes)}
        print(json.dumps(result | ({"same_bytes": at_same_bytes(outcomes)} if same_bytes else {}), indent=2))
    else:
        for table in [*tables_of(outcomes), *([bytes_table(outcomes)] if same_bytes else [])]:
            Console(markup=False).print(table, "", sep="\n", highlight=False)


def grouped(outcomes: Iterable[LearningResult]) -> list[list[LearningResult]]:
    """Outcomes that differ by their seed alone, together, in order of first appearance."""
    groups: dict[str, list[LearningResult]] = {}
    for outcome in outcomes:
        facts = {name: value for name, value in outcome.setting.items() if name != "seed"}
        groups.setdefault(json.dumps(facts, sort_keys=True), []).append(outcome)
    return list(groups.values())


def varied(outcomes: Sequence[LearningResult]) -> list[str]:
    """The facts in which the outcomes differ, the seed aside: the columns that a table needs."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.setting)
    return [
        name
        for name in names
        if name != "seed" and len({json.dumps(outcome.setting.get(name)) for outcome in outcomes}) > 1
    ]


def rows(outcomes: Sequence[LearningResult]) -> list[dict[str, object]]:
    """One row for each setting, over its seeds: what distinguishes it, then what came of it.

    `difference` is that of its loss to the first setting's, seed by seed over those that both have. `effective` are
    the replicas of all-reduce that learn as much, where its losses of several numbers are among the outcomes.
    """
    columns, groups, all_reduce = varied(outcomes), grouped(outcomes), AllReduceCurves(outcomes)
    first = {outcome.setting["seed"]: outcome.loss for outcome in groups[0]}
    result = []
    for group in groups:
        losses = [outcome.loss for outcome in group]
        differences = [o.loss - first[o.setting["seed"]] for o in group if o.setting["seed"] in first]
        facts: dict[str, object] = {name: group[0].setting.get(name) for name in columns}
        result.append(
            facts
            | {
                "loss": round(mean(losses), 4),
                "loss_deviation": round(stdev(losses), 4) if len(losses) > 1 else 0.0,
                "loss_interval": interval(losses),
                "difference": round(mean(differences), 4) if differences else None,
                "difference_interval": interval(differences),
                "loss_by_seed": {str(o.setting["seed"]): round(o.loss, 4) for o in group},
                "loss_of_mean": round(mean(o.loss_of_mean for o in group), 4),
                "effective": all_reduce.effective(group),
                "spread": mean(o.spread for o in group),
                "bytes_per_token": round(mean(o.bytes_per_token for o in group), 3),
                "bytes_per_replica": round(mean(o.bytes_per_replica for o in group)),
                "share": round(mean(o.share for o in group), 5),
                "rounds": round(mean(o.rounds for o in group), 1),
                "paired": round(mean(o.paired for o in group), 3),
                "blocked": round(mean(o.blocked for o in group), 4),
                "tokens": round(mean(o.tokens for o in group)),
                "seeds": len(group),
            }
        )
    return result


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean, by Student's t; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    return round(float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count), 4)


def tables_of(outcomes: Sequence[LearningResult]) -> list[Table]:
    """Tables with a row for each setting: what it learnt, what that took, and its losses by seed."""
    found = rows(outcomes)
    has_effective = any(row["effective"] is not None for row in found)
    learnt = _table("loss", "to the first", "mean's", "spread", *(["learns like"] if has_effective else []))
    took = _table("bytes/token", "of all-reduce", "rounds", "paired", "blocked")
    by_seed = _table("loss by seed", left=True)
    for number, (group, row) in enumerate(zip(grouped(outcomes), found, strict=True)):
        name = ", ".join(_told(fact, row[fact]) for fact in varied(outcomes)) or "all alike"
        learnt.add_row(
            name,
            _with_interval(row["loss"], row["loss_interval"], ".3f"),
            _with_interval(row["difference"], row["difference_interval"], "+.3f") if number else "",
            f"{row['loss_of_mean']:.3f}",
            f"{row['spread']:.1e}",
            *([_effective(row["effective"])] if has_effective else []),
        )
        cells = ("{bytes_per_token:.1f}", "{share:.1%}", "{rounds:.0f}", "{paired:.0%}", "{blocked:.1%}")
        took.add_row(name, *(cell.format(**row) for cell in cells))
        by_seed.add_row(name, " ".join(f"{outcome.loss:.3f}" for outcome in group))
    several = any(len(group) > 1 for group in grouped(outcomes))
    return [learnt, took, *([by_seed] if several else [])]


def points_of(outcome: LearningResult) -> list[tuple[int, float, float]]:
    """The curve (tokens, loss, spread) up to the numbers that the table has, which are of more text."""
    before = [point for point in outcome.curve if point[0] < outcome.tokens]
    return [*before, (outcome.tokens, outcome.loss, outcome.spread)]


def at_same_bytes(outcomes: Sequence[LearningResult]) -> list[dict[str, object]]:
    """One row for each setting: its loss where a replica had sent as many bytes as the frugal one's in all.

    `bytes` is the least that a replica of any setting sends that sends at all. The loss is read off between two
    points of the curve: the learning rate was not at its end there, so that a run made for so many bytes does better.
    `tokens_share` is the part of the run's tokens that a replica had trained on. Both are None for a setting that
    sends nothing, and where the bytes come before the curve's first point.
    """
    least = min((o.bytes_per_replica for o in outcomes if o.bytes_per_replica > 0), default=0.0)
    result = []
    for group in grouped(outcomes):
        losses = [_loss_at(outcome, least) for outcome in group]
        shares = [least / o.bytes_per_replica for o in group if o.bytes_per_replica > 0]
        known = [loss for loss in losses if loss is not None]
        is_known = len(known) == len(group)
        facts: dict[str, object] = {name: group[0].setting.get(name) for name in varied(outcomes)}
        result.append(
            facts
            | {
                "bytes": round(least),
                "loss": round(mean(known), 4) if is_known else None,
                "loss_interval": interval(known) if is_known else None,
                "tokens_share": round(min(1.0, mean(shares)), 4) if is_known else None,
            }
        )
    return result


def _loss_at(outcome: LearningResult, sent: float) -> float | None:
    """Return the loss of a replica after it has sent that number of bytes evenly; None where it has none."""
    if not outcome.bytes_per_replica:
        return None
    points = points_of(outcome)
    tokens = min(outcome.tokens, outcome.tokens * sent / outcome.bytes_per_replica)
    if tokens < points[0][0]:
        return None
    return float(np.interp(tokens, [point[0] for point in points], [point[1] for point in points]))


def bytes_table(outcomes: Sequence[LearningResult]) -> Table:
    """The rows of `at_same_bytes` as a table."""
    found = at_same_bytes(outcomes)
    table = _table(f"loss at {amount(float(str(found[0]['bytes'])))}", "of its tokens")
    for row in found:
        name = ", ".join(_told(fact, row[fact]) for fact in varied(outcomes)) or "all alike"
        share = "" if row["tokens_share"] is None else f"{row['tokens_share']:.0%}"
        table.add_row(name, _with_interval(row["loss"], row["loss_interval"], ".3f") or "-", share or "-")
    return table


def _table(*columns: str, left: bool = False) -> Table:
    """A table whose settings wrap between words where a terminal is narrow, and whose numbers stay whole."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", min_width=24)
    for column in columns:
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    return table


def _told(fact: str, value: object) -> str:
    name = SHOWN.get(fact, fact.rpartition(".")[2])
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _effective(replicas: object) -> str:
    return "" if replicas is None else f"{replicas:.1f} replicas"


def _with_interval(value: object, half: object, form: str) -> str:
    if value is None:
        return ""
    return f"{value:{form}}" + (f" ± {half:.3f}" if half is not None else "")


def plot_learning(outcomes: Sequence[LearningResult], file: Path) -> None:
    """Validation loss and replica spread against tokens; one line for each setting, its first seed."""
    columns = varied(outcomes) or ["method"]
    with figure(file, panels=2) as (losses, spreads):
        for first, *_ in grouped(outcomes):
            label = ", ".join(f"{name} {first.setting[name]}" for name in columns)
            points = points_of(first)
            tokens = [point[0] / 1e6 for point in points]
            losses.plot(tokens, [point[1] for point in points], label=label, linewidth=1.2)
            if any(point[2] > 0 for point in points):
                spreads.plot(tokens, [point[2] for point in points], label=label, linewidth=1.2)
        losses.set(xlabel="million tokens", ylabel="validation loss, nats per token")
        spreads.set(xlabel="million tokens", ylabel="replica spread", yscale="log")
        losses.legend(frameon=False, fontsize=7)
