"""What `noloco simulate learning` does: run every combination of settings, draw them, show them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bootstrap.creating.choosing import RunOptions
from bootstrap.simulation.learning import LearningSetting
from bootstrap.simulation.learning_settings import combinations, one_setting
from bootstrap.simulation.learning_table import table_of, tell
from bootstrap.simulation.study import rows, run_study


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
        # matplotlib: only who plots waits for it
        from bootstrap.simulation.learning_plot import plot_learning

        plot_learning(outcomes, plot)
    if as_json:
        print(json.dumps({"simulation": "learning", "results": rows(outcomes)}, indent=2))
    else:
        Console().print(table_of(outcomes))
