"""The picture of a learning study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bootstrap.figure import figure
from bootstrap.simulation.learning import LearningResult
from bootstrap.simulation.study import grouped, varied


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
