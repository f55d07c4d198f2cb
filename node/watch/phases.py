"""The phases of a node until it trains: told as they begin, while they last, and in one line at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("noloco")

PATIENCE = 3.0  # seconds of silence before people hear again what goes on: one more until that is looked at
LEAST_SHOWN = 0.1  # seconds: what took less is not in the summary


class Phases:
    """Reports the phases of a start: each as it begins, while it lasts, and all in one line at the end.

    Mutable state: the phases over and their seconds, the one at hand, and when something was told last.

    Called by one thread at a time: the one that imports, then the event loop's.
    """

    def __init__(
        self, tell: Callable[[str], None] = logger.info, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._first = self._began = self._told = clock()
        self._over: list[tuple[str, float]] = []
        self.doing = ""  # the phase at hand, empty when there is none
        self.detail: Callable[[], str] = str  # how far it is, for those who wait

    def begin(self, doing: str, detail: Callable[[], str] = str) -> None:
        """Begin the next phase, as "dialling 2 addresses"; `detail` is asked for how far it is, while it lasts."""
        self._finish()
        if not self._over:  # of the start, or of a move
            self._first = self._began
        self.doing, self.detail = doing, detail
        self._say(f"{doing[:1].upper()}{doing[1:]} …")

    def end(self) -> None:
        """End the phases: say what took how long. Without a phase at hand nothing is said."""
        if not self.doing:
            return
        self._finish()
        shown = [f"{doing} {seconds:.1f} s" for doing, seconds in self._over if seconds >= LEAST_SHOWN]
        self._over.clear()
        self._say(
            f"Began to train after {self._clock() - self._first:.1f} s: {', '.join(shown) or 'at once'}."
        )

    def drop(self) -> None:
        """Drop the phase at hand, such as the first step of a stage that is given up; nothing is said."""
        self._finish()
        self._over.clear()

    def look(self) -> None:
        """Repeat what goes on once nothing was told for `PATIENCE`; called every second."""
        now = self._clock()
        if self.doing and now - self._told >= PATIENCE:
            detail = self.detail()
            self._say(f"Still {self.doing}{detail and ': '}{detail} ({now - self._began:.0f} s).")

    def _finish(self) -> None:
        now = self._clock()
        if self.doing:
            self._over.append((self.doing, now - self._began))
        self.doing, self.detail, self._began = "", str, now

    def _say(self, sentence: str) -> None:
        self._told = self._clock()
        self._tell(sentence)


@contextmanager
def told_while_importing(phases: Phases) -> Iterator[None]:
    """Look at the phases from a thread of its own: an import keeps this one."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(1.0):
            phases.look()

    thread = threading.Thread(target=look, name="phases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
