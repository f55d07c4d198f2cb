"""The phases of a node until it trains: told as they begin, while they last, and in one line at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from node.watch.waiting import WaitingLine

logger = logging.getLogger("noloco")

LOOK_SECONDS = 1.0
LEAST_SHOWN = 0.1  # seconds: what took less is not in the summary
WAITS = "waits"  # set on the record of a line that a terminal shows in place


def log_waiting(line: str) -> None:
    """Log the line about a wait; a terminal that rewrites it leaves it out."""
    logger.info(line, extra={WAITS: True})


class Phases:
    """Reports the phases of a start: each as it begins, while it lasts, and all in one line at the end.

    Mutable state: the phases over and their seconds, and the one at hand.

    Called by one thread at a time: the one that imports, then the event loop's.
    """

    def __init__(
        self,
        tell: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = log_waiting,
        rewrite: Callable[[str], None] | None = None,
    ) -> None:
        """`tell` takes the sentence at the end; `write` and `rewrite` are as of `WaitingLine`."""
        self._tell = tell
        self._clock = clock
        self._line = WaitingLine(write, rewrite, clock)
        self._first = self._began = clock()
        self._over: list[tuple[str, float]] = []
        self.doing = ""  # the phase at hand, empty when there is none
        self.detail: Callable[[], str] = str  # how far it is, for those who wait
        self.missing: Callable[[], str] = str  # a sentence about what is missing, which matters more

    def begin(self, doing: str, detail: Callable[[], str] = str, missing: Callable[[], str] = str) -> None:
        """Begin the next phase, as "dialling 2 addresses"; `detail` is asked for how far it is, while it lasts.

        `missing` is asked for a sentence that takes the phase's place: a wait of its own while it is not empty.
        """
        self._finish()
        if not self._over:  # of the start, or of a move
            self._first = self._began
        self.doing, self.detail, self.missing = doing, detail, missing
        self.look()

    def end(self) -> None:
        """End the phases: say what took how long. Without a phase at hand nothing is said."""
        if not self.doing:
            return
        self._finish()
        self._line.clear()
        shown = [f"{doing} {seconds:.1f} s" for doing, seconds in self._over if seconds >= LEAST_SHOWN]
        self._over.clear()
        self._tell(
            f"Began to train after {self._clock() - self._first:.1f} s: {', '.join(shown) or 'at once'}."
        )

    def drop(self) -> None:
        """Drop the phase at hand, such as the first step of a stage that is given up; nothing is said."""
        self._finish()
        self._line.clear()
        self._over.clear()

    def look(self) -> None:
        """Show what goes on, see `WaitingLine`; called every second."""
        if not self.doing:
            return
        if missing := self.missing():
            self._line.show(missing, lambda waited: f"{missing} ({waited:.0f} s)" if waited else missing)
        else:
            self._line.show(self.doing, self._in_words)

    def _in_words(self, waited: float) -> str:
        detail = self.detail()
        if not waited:
            what = f"{self.doing[:1].upper()}{self.doing[1:]}"
            return f"{what}: {detail}" if detail else f"{what} …"
        return f"Still {self.doing}{detail and ': '}{detail} ({waited:.0f} s)."

    def _finish(self) -> None:
        now = self._clock()
        if self.doing:
            self._over.append((self.doing, now - self._began))
        self.doing, self.detail, self.missing, self._began = "", str, str, now


@contextmanager
def told_while_importing(phases: Phases) -> Iterator[None]:
    """Look at the phases from a thread of its own: an import keeps this one."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            phases.look()

    thread = threading.Thread(target=look, name="phases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
