"""The report of `noloco manifest check --device`: how fast, how long, how much, what limits a run and what helps."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootstrap.checking.costs import Cost, Limit
from bootstrap.checking.report import DeviceReport
from bootstrap.display import plain_table
from node.machine.devices import EFFICIENCY
from node.watch.words import amount, count, duration

ABOUT_SPEEDS = (
    f"Computing: published bf16 arithmetic, of which {EFFICIENCY:.0%} is assumed to be reached, with kernels of 5 µs "
    "at least (assumed), and memory bandwidth in the optimizer's step; --measure measures this machine. *: in "
    "smaller steps, which is slower (docs/memory.md). Links: 5% more than the bytes of the messages."
)


def show_costs(speeds: Sequence[DeviceReport], costs: Sequence[Cost | None], replicas: int) -> None:
    if not speeds:
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for cost in costs:
        if cost is not None:
            grid.add_row(cost.device, Text(in_words(cost, replicas)))
    grid.add_row("speeds", Text(ABOUT_SPEEDS))
    Console(markup=False).print("", device_table(speeds, costs), "", grid, sep="\n", highlight=False)


def device_table(speeds: Sequence[DeviceReport], costs: Sequence[Cost | None]) -> Table:
    """One row for each device: what it computes, what its links carry, and what comes of both."""
    headings = ("device", "memory", "TFLOPS", "used", "computes", "links carry", "trains", "hours")
    table = plain_table(
        "Tokens a second of one replica of each stage on such devices:", headings, left=("device",)
    )
    for speed, cost in zip(speeds, costs, strict=True):
        device, is_smaller = speed.device, any(stage.fits == "smaller" for stage in speed.stages)
        used = "measured" if device.efficiency == 1.0 else f"{device.efficiency:.0%}"
        facts = (device.name, f"{device.memory:.0f} GB", f"{device.tflops:.3g}", used)
        if cost is None:
            table.add_row(*facts, "does not fit", "", "", "")
            continue
        links = cost.link_tokens_per_second
        table.add_row(
            *facts,
            f"{cost.compute_tokens_per_second:,.0f}{' *' * is_smaller}",
            f"{links:,.0f}" if links < float("inf") else "-",
            f"{cost.tokens_per_second:,.0f}",
            amount(cost.hours),
        )
    return table


def in_words(cost: Cost, replicas: int) -> str:
    """Say in sentences all that the table leaves out."""
    stages, total = len(cost.uploaded), cost.tokens_per_second * replicas
    said = [
        f"{count(cost.tokens)} tokens in {duration(3600 * cost.hours)}, with {replicas} "
        f"replica{'s' * (replicas > 1)} of {stages} stage{'s' * (stages > 1)} at {total:,.0f} tokens/s in all.",
        f"A volunteer sends {_range(cost.uploaded)} and receives {_range(cost.downloaded)}.",
    ]
    said += _paid(cost)
    said.append(_limited(cost))
    if cost.helps:
        changes = ", ".join(f"{change.setting} ({change.tokens_per_second:,.0f})" for change in cost.helps)
        said.append(f"What would help, with tokens/s for as many devices: {changes}.")
    return " ".join(said)


def _paid(cost: Cost) -> list[str]:
    """Sentences on power and money, as far as watts and prices are known."""
    said = [f"The devices cost {amount(cost.rent)} in all."] if cost.rent else []
    if cost.kwh:
        price = f", which cost {amount(cost.power)}" if cost.power else ""
        said.append(f"At full load they take {amount(cost.kwh)} kWh{price}.")
    else:
        said.append("What it takes of power is not known: name its --watts.")
    return said


def _limited(cost: Cost) -> str:
    of_stage = f" of stage {cost.stage}" if cost.limit is Limit.COMPUTE or cost.limit.is_link else ""
    return f"What limits is {cost.limit}{of_stage}."


def _range(amounts: Sequence[float]) -> str:
    least, most = min(amounts), max(amounts)
    return _terabytes(most) if most < 1.05 * least else f"{_terabytes(least)} to {_terabytes(most)}"


def _terabytes(nbytes: float) -> str:
    return f"{nbytes / 1e12:.3g} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g} GB"
