"""Progress bars in a terminal; elsewhere only the sentences that are told between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bars:
    """Mutable state: one bar for each thing that is done."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._shown.add_task(name, total=total)
        self._shown.update(self._tasks[name], completed=done, total=total)

    def tell(self, sentence: str) -> None:
        """A line above the bars."""
        self._shown.console.print(sentence, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def bars() -> Iterator[Bars]:
    """Bars that vanish when everything is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as shown:
        yield Bars(shown)
