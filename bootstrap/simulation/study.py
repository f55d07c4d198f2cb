"""Studies of many settings: several at a time in processes of their own, each outcome kept as soon as it is there."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

from bootstrap.simulation.learning import LearningResult, LearningSetting, simulate
from protocol.errors import DataError
from protocol.manifest import Manifest, manifest_from

OnOutcome = Callable[[LearningResult, int, int], None]  # outcome, how many are done, how many there are


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
    wire: dict[str, Any] | None = None,
    inner: dict[str, Any] | None = None,
    **outer: Any,
) -> LearningSetting:
    """`base` with changes, and validated. Raises `ManifestError` for settings that contradict each other."""
    contents = base.model_dump()
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
    if method != "all-reduce":
        contents["outer"]["method"] = method
    made = manifest_from(contents)
    return LearningSetting(
        made, replicas, seed, method == "all-reduce", slow, latency, mbit, validation_sequences
    )


def run_study(
    settings: Sequence[LearningSetting], file: Path | None, jobs: int, on_outcome: OnOutcome
) -> list[LearningResult]:
    """Outcomes in the order of `settings`. Those already in `file` (JSON lines) are not run again.

    Each new one is appended to it at once, so a study that is stopped goes on where it was. Raises
    `DataError` for a file that holds something else.
    """
    known = {outcome.key: outcome for outcome in read_outcomes(file)} if file is not None else {}
    wanted = {setting.key: setting for setting in settings}
    missing = [setting for key, setting in wanted.items() if key not in known]
    done = len(wanted) - len(missing)
    for outcome in as_they_end(simulate, missing, jobs):
        known[outcome.key] = outcome
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
        done += 1
        on_outcome(outcome, done, len(wanted))
    return [known[setting.key] for setting in settings]


def read_outcomes(file: Path) -> list[LearningResult]:
    """The outcomes in a file of a study; none when there is no file yet."""
    if not file.exists():
        return []
    names = {field.name for field in fields(LearningResult)}
    outcomes = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            contents = json.loads(line)
            outcome = LearningResult(**{name: contents[name] for name in names})
            outcome.curve = [(tokens, loss, spread) for tokens, loss, spread in outcome.curve]
            outcomes.append(outcome)
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{file}, line {number}, is not an outcome of this version's study. "
                "Name another file, or remove that line."
            ) from None
    return outcomes


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


def spread_over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, 0 for a single value."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def rows(outcomes: Sequence[LearningResult]) -> list[dict[str, Any]]:
    """One row for each setting, over its seeds; for tables and JSON."""
    columns = varied(outcomes)
    result = []
    for group in grouped(outcomes):
        loss, deviation = spread_over_seeds([outcome.loss for outcome in group])
        first = group[0]
        result.append(
            {name: first.setting.get(name) for name in columns}
            | {
                "loss": round(loss, 4),
                "loss_deviation": round(deviation, 4),
                "loss_by_seed": {str(o.setting["seed"]): round(o.loss, 4) for o in group},
                "loss_of_mean": round(mean(o.loss_of_mean for o in group), 4),
                "spread": mean(o.spread for o in group),
                "bytes_per_token": round(mean(o.bytes_per_token for o in group), 3),
                "bytes_per_replica": round(mean(o.bytes_per_replica for o in group)),
                "rounds": round(mean(o.rounds for o in group), 1),
                "paired": round(mean(o.paired for o in group), 3),
                "blocked": round(mean(o.blocked for o in group), 4),
                "tokens": round(mean(o.tokens for o in group)),
                "seeds": len(group),
            }
        )
    return result


Item = TypeVar("Item")
Result = TypeVar("Result")


def as_they_end(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """What `work` makes of each item, in the order in which they end; `jobs` processes at a time.

    With one job all is done in this process, in the order of the items. `work`, items and results are pickled
    otherwise. An error of `work` comes out here. Nothing further begins after that or when the iterator is
    closed, and that waits for what is under way.
    """
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), mp_context=spawn) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(running):
                yield future.result()
        finally:
            for future in running:
                future.cancel()
