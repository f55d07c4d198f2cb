"""A terminal with lines that stay, and below them one view that is always up to date.

It does without torch: it is there while that is imported.
"""

from __future__ import annotations

import logging

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from node.watch.phases import WAITS


class Screen(logging.Handler):
    """Log lines, and below them what is waited for or a panel. Mutable state: what rich keeps of the screen."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, WAITS):  # it stands below
            return
        try:
            self._console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:  # noqa: BLE001  as every handler: a line that cannot be shown stops nothing
            self.handleError(record)

    def wait(self, line: str) -> None:
        """Show what is waited for, or nothing for an empty line."""
        self.show(Text(line))

    def show(self, shown: RenderableType) -> None:
        """Show this below the lines in place of what was there."""
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # the process may end without a chance to bring it back
        self._live.update(shown, refresh=True)

    def close(self) -> None:
        self._live.stop()
        super().close()


def screen_here() -> Screen | None:
    """Return a screen where people look at a terminal that can show one."""
    console = Console(stderr=True, markup=False)
    return Screen(console) if console.is_terminal and not console.is_dumb_terminal else None
