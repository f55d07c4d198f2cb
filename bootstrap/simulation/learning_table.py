"""What came of simulated runs: a line as each ends, and a table of all."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bootstrap.simulation.learning import LearningResult
from bootstrap.simulation.study import rows

SHOWN = {  # how columns are called in the table
    "learning_rate": "lr",
    "microbatches": "micro-\nbatches",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
}


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
    found = rows(outcomes)
    measured = {"loss", "loss_deviation", "loss_by_seed", "loss_of_mean", "spread", "bytes_per_token"}
    measured |= {"bytes_per_replica", "rounds", "paired", "blocked", "tokens", "seeds"}
    columns = [name for name in (found[0] if found else {}) if name not in measured]
    for name in columns:
        table.add_column(SHOWN.get(name, name))
    for name in ("loss", "by seed", "mean's", "spread", "bytes/\ntoken", "rounds", "paired", "blocked"):
        table.add_column(name, justify="right")
    for row in found:
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
