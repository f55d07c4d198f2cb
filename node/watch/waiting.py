"""The one line about a wait: rewritten in place on a terminal, written to a file or a pipe more and more rarely."""

from __future__ import annotations

import time
from collections.abc import Callable

REPEATS = (10.0, 30.0, 60.0, 300.0)  # seconds of a wait after which its line is written again
EVERY = 1800.0  # seconds from one line to the next after those


def next_repeat(waited: float) -> float:
    """The time, in seconds of the wait, of the first line due after `waited`."""
    return next((at for at in REPEATS if at > waited), EVERY * (waited // EVERY + 1))


class WaitingLine:
    """Shows what is waited for.

    Mutable state: what is waited for, since when, and the time of this wait at which its line is written next.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        rewrite: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`write` takes the lines that stay; `rewrite`, of a terminal, each line instead of the one before it."""
        self._write = write
        self._rewrite = rewrite or (lambda _: None)
        self._clock = clock
        self._what = ""
        self._began = 0.0
        self._due = 0.0

    @property
    def waited(self) -> float:
        """Seconds since the wait at hand began."""
        return self._clock() - self._began

    def show(self, what: str, line: Callable[[float], str]) -> None:
        """Show `line`, given the seconds waited. Another `what` than before is another wait, written at once."""
        if what != self._what:
            self._what, self._began, self._due = what, self._clock(), 0.0
            waited = 0.0
        else:
            waited = self.waited
        text = line(waited)
        if waited >= self._due:
            self._due = next_repeat(waited)
            self._write(text)
        self._rewrite(text)

    def clear(self) -> None:
        """End the wait; the terminal's line vanishes."""
        if self._what:
            self._what = ""
            self._rewrite("")
