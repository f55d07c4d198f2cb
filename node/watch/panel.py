"""A volunteer's panel, which stands below the lines of a terminal. Pure."""

from __future__ import annotations

from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from node.watch.pulse import (
    Pulse,
    busy_in_words,
    device_in_words,
    loss_in_words,
    network_in_words,
    speed_in_words,
    step_in_words,
)
from node.watch.words import count


def panel_of(pulse: Pulse, title: str) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("step", step_in_words(pulse).removeprefix("Step "))
    grid.add_row("", ProgressBar(pulse.total_steps, pulse.step, width=40))
    grid.add_row("loss", loss_in_words(pulse).removeprefix("loss "))
    grid.add_row("speed", speed_in_words(pulse))
    grid.add_row("device", device_in_words(pulse))
    grid.add_row("time", busy_in_words(pulse))
    grid.add_row("network", network_in_words(pulse))
    grid.add_row("given", f"{count(pulse.given)} tokens in all lives of this node")
    return Panel(grid, title=f"{title}, stage {pulse.stage}", title_align="left", expand=False)
