"""A volunteer's view: lines, and in a terminal a panel below them that is always up to date."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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


class LivePanel(logging.Handler):
    """Log lines above, the panel below. Mutable state: what rich keeps of the screen."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:  # noqa: BLE001  as every handler: a line that cannot be shown stops nothing
            self.handleError(record)

    def show(self, pulse: Pulse, title: str) -> None:
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # the process may end without a chance to bring it back
        self._live.update(panel_of(pulse, title), refresh=True)

    def close(self) -> None:
        self._live.stop()
        super().close()


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
